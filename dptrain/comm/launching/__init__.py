"""How ranks are started: by which launcher, with which MPI, and from which script."""
