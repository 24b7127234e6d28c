"""What deploys Weightplane, tried for real: units under a booted systemd, images that are built and run. Needs root."""
