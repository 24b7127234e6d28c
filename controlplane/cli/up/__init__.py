"""`weightplane up`: a whole fleet file, on this machine or on a Ray cluster.

It starts processes, and starts them again; what they are told is in the fleet file (`controlplane.fleet_file`) and
nowhere else, so a process that something else starts from that file is the same. `places` is the port for another
cluster.
"""
