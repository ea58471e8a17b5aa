"""The server's terminal output, and the log file with the full output."""
