"""Fault containment: an exception or a non-finite number ends only its own request, not the scheduler."""
