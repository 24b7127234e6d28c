"""SIGKILL and SIGSTOP of each process at each phase of a push, and what became of it: it writes docs/failures.md.

`matrix` and `deaths` say what is tried, `fleet` and `dying` do it, `observer` and `truth` judge. A new phase is a
failpoint and a row in `matrix`. Nothing may help the fleet but what systemd would do.
"""
