"""Draw emnist.png: the first test image of each class of EMNIST balanced, from shards.

python docs/figures/emnist.py shards/emnist
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from fedmpi.data.opening import open_store

x, y = open_store(sys.argv[1]).test()
first = [int(np.flatnonzero(y == label)[0]) for label in range(47)] + [0]
tiles = np.asarray(x)[first, 0].reshape(4, 12, 28, 28)
tiles[-1, -1] = 0
picture = tiles.transpose(0, 2, 1, 3).reshape(4 * 28, 12 * 28)
images = Path(__file__).resolve().parents[1] / "images"
Image.fromarray(255 - picture).resize((12 * 56, 4 * 56)).save(images / "emnist.png", optimize=True)
