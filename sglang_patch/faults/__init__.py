"""An exception or a number that is not finite ends its own request, not the scheduler."""
