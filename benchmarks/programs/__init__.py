"""Training steps and inference passes of dptrain and of other libraries."""
