"""Models out of kvpath and into it."""
