"""`weightplane up`: a whole fleet file, on this machine or on a Ray cluster.

How processes are started, watched and ended. What they are started with is said by `controlplane.fleet_file` alone.
"""
