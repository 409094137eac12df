"""Entry point inside the image: finds the packages beside it and runs the warden."""

import sys

sys.path.insert(0, "/sbx/lib")

from sandbox.image.warden import main

main()
