"""`weightplane up`: a whole fleet file on this machine."""
