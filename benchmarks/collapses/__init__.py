"""Small runs of which some are made to collapse, for `toolrl bench planted`."""
