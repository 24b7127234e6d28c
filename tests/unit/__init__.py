"""Claims of one module, core or command, in the test's own process.

A new module's tests are a file of its name, or of the claim where several share one. A process is started only where
it is the point; fleets of them are for `integration`. Tests here run beside others, in any order, and share nothing.
"""
