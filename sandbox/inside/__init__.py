"""What runs inside a box, whichever backend made it: frames, the cell runner, the interpreter child and the service
loop.

Standard library only, Python >= 3.11. The image holds a copy of this package; nothing here wipes a directory.
"""
