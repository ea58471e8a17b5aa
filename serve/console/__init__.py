"""What a server shows in the terminal, and the file that has all the rest."""
