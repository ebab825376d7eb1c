"""What reading, starting, decoding and recording take, before and after."""
