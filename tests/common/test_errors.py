"""Messages of exceptions: type and words; for an attribute that an object of fedmpi lacks, those that it has."""

from pathlib import Path

import numpy as np

from fedmpi.clients.sampler import View
from fedmpi.common.errors import raised
from fedmpi.common.streams import Streams
from fedmpi.local.algorithm import Vectors


def said(asked) -> str:
    try:
        asked()
    except AttributeError as error:
        return raised(error)
    raise AssertionError("nothing was raised")


def test_of_an_attribute_that_a_view_lacks_the_others_are_named():
    view = View(0, 1, np.array([3]), 1, Streams(0))
    text = said(lambda: view.clients)
    assert text.startswith("AttributeError: 'View' object has no attribute 'clients' (it has age, available, ")
    assert text.endswith("wanted)") and "_kept" not in text


def test_other_objects_and_properties_that_fail_within_are_left_alone():
    view = View(0, 1, np.array([3]), 1, Streams(0), counts=lambda: Path().size)
    assert said(lambda: Path().clients).endswith("object has no attribute 'clients'")
    assert said(lambda: view.class_counts).endswith("object has no attribute 'size'")
    assert said(lambda: Vectors("client", {}, {"index": 1}).c).endswith("it also knows index")
    assert said(lambda: setattr(view, "count", 2)) == "FrozenInstanceError: cannot assign to field 'count'"


def test_an_exception_that_cannot_be_written_leaves_its_type():
    class Silent(Exception):
        def __str__(self) -> str:
            raise OSError("no words")

    assert raised(Silent()) == "Silent, which cannot be written (OSError)"
