"""What each command does; :mod:`gateway.cli` says how it is called and imports these when it is."""
