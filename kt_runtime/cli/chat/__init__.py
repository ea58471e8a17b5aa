"""`kt-runtime chat`: a conversation in the terminal."""
