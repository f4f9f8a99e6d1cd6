"""Your own samples in memory: three clients that hold different digits.

python docs/examples/own_data.py
"""

import numpy as np
from sklearn.datasets import load_digits

import fedmpi

x, y = load_digits(return_X_y=True)
x = (x / 16).astype(np.float32)
owner = np.minimum(y // 4, 2)  # client 0 holds digits 0 to 3, client 1 holds 4 to 7, client 2 the rest
held = np.arange(len(y)) % 5 == 0
data = fedmpi.ClientArrays(x[~held], y[~held], owner[~held], test=(x[held], y[held]))
run = fedmpi.run("fedavg", {"rounds": 10, "clients.sampler": "all"}, data=data)
print(f"accuracy on all ten digits: {run.summary['final']['test_accuracy']:.3f}")
