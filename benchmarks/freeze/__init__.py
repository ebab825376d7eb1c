"""What every verb that reads a file says of every capture and input, to be compared with what later code says."""
