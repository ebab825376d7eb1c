"""The Textual screens. They see records and a debug session, never tensors."""
