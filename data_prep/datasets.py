"""Built-in data sets by name, and data sets read by custom readers ("package.module:function")."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from data_prep.formats.cifar import read_cifar
from data_prep.formats.idx import read_emnist, read_fashion_mnist, read_mnist
from data_prep.formats.images import read_cinic10, read_image_folder
from data_prep.formats.leaf import LETTERS, read_femnist, read_shakespeare
from data_prep.formats.own import MEMBERS, is_meant, of_arrays, read_own_files
from data_prep.formats.texts import read_amazon, read_mind, read_sentiment140
from data_prep.holdout import hold_out_test
from data_prep.raw import TEXT_OPTIONS, UNKNOWN, DataSet, RawDataset, ReadOptions, Source, Tally, measure, rows_of
from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.errors import UserError, suggestion
from fedmpi.common.registry import Component, register, resolve
from fedmpi.data.opening import load_digits_split

OF_ARRAYS = frozenset({"targets", "task", "split"})
"""Fields of ReadOptions that describe arrays."""
MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
FASHION_FILES = {  # as in the README of the official repository
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
EMNIST_SPLITS = {
    "balanced": ("112,800 + 18,800", 47),
    "byclass": ("697,932 + 116,323", 62),
    "bymerge": ("697,932 + 116,323", 47),
    "letters": ("124,800 + 20,800", 26),
    "digits": ("240,000 + 40,000", 10),
    "mnist": ("60,000 + 10,000", 10),
}
"""Samples (training + test) and classes of each split. byclass has all 62 classes. bymerge merges both cases of 15
letters. balanced has equally many samples of each of these 47 classes. letters merges both cases of every letter."""
LEAF = "S. Caldas et al., LEAF: a benchmark for federated settings, 2018"


def _emnist(split: str, samples: str, classes: int) -> DataSet:
    kinds = ("images-idx3", "labels-idx1")
    members = [f"gzip/emnist-{split}-{part}-{kind}-ubyte.gz" for part in ("train", "test") for kind in kinds]
    archive = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
    return DataSet(
        name=f"emnist-{split}",
        samples=samples,
        classes=str(classes),
        licence="no formal license (from NIST Special Database 19, a US government work); cite the paper",
        citation="G. Cohen, S. Afshar, J. Tapson, A. van Schaik, EMNIST: an extension of MNIST to handwritten letters, "
        "2017",
        page="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        files=f"the emnist-{split}-* files (idx, plain or .gz, and the mapping)",
        reader=read_emnist,
        sources=(
            Source(archive, "md5:58c8d27c78d21e728a6bc7b3cc06412e", (*members, f"gzip/emnist-{split}-mapping.txt")),
        ),
    )


def _cifar(classes: int, files: str, md5: str) -> DataSet:
    return DataSet(
        name=f"cifar{classes}",
        samples="50,000 + 10,000",
        classes=str(classes),
        licence="no formal license; cite the technical report",
        citation="A. Krizhevsky, Learning multiple layers of features from tiny images, University of Toronto, 2009",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        files=f"the unpacked folder cifar-{classes}{files}",
        reader=read_cifar,
        sources=(Source(f"https://www.cs.toronto.edu/~kriz/cifar-{classes}-python.tar.gz", f"md5:{md5}"),),
    )


def read_digits(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Return scikit-learn's digits, as in `data.source = "digits"`; features (1, 8, 8) uint8, pixel values 0 ... 16."""
    train_x, train_y, test_x, test_y = load_digits_split()
    return data_set.images(tuple("0123456789"), rows_of(train_x, test_x), train_y, test_y, fit=measure)


OWN_ARRAYS = DataSet(
    name="arrays",
    files="an .npz or HDF5 file with x, y and optionally user, x_test, y_test, or a table (.csv, .tsv, .parquet, "
    ".arrow), or a folder of tables or HDF5 files (train and test by name)",
    reader=read_own_files,
    options=TEXT_OPTIONS | OF_ARRAYS | {"label", "user", "features", "inputs", "delimiter", "encoding", "image_size"},
    raw="file",
)
ALL = (
    DataSet(
        name="mnist",
        samples="60,000 + 10,000",
        classes="10",
        licence="CC BY-SA 3.0 (as usually given)",
        citation="Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-based learning applied to document recognition, "
        "Proceedings of the IEEE, 1998",
        page="http://yann.lecun.com/exdb/mnist/",
        files="the four idx files of MNIST (train-images-idx3-ubyte, ...; plain or .gz)",
        reader=read_mnist,
        sources=tuple(
            Source(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}", f"sha256:{digest}")
            for name, digest in MNIST_FILES.items()
        ),
    ),
    DataSet(
        name="fashion-mnist",
        samples="60,000 + 10,000",
        classes="10",
        licence="MIT",
        citation="H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST: a novel image dataset for benchmarking machine "
        "learning algorithms, 2017",
        page="https://github.com/zalandoresearch/fashion-mnist",
        files="the four idx files of Fashion-MNIST (train-images-idx3-ubyte, ...; plain or .gz)",
        reader=read_fashion_mnist,
        sources=tuple(
            Source(f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}", f"md5:{digest}")
            for name, digest in FASHION_FILES.items()
        ),
    ),
    *(_emnist(split, samples, classes) for split, (samples, classes) in EMNIST_SPLITS.items()),
    _cifar(10, "-batches-py (data_batch_1 ... 5, test_batch, batches.meta)", "c58f30108f718f92721af3b95e74349a"),
    _cifar(100, "-python (train, test, meta)", "eb9058c3a382ffc7106e4002c42a8d85"),
    DataSet(
        name="cinic10",
        samples="90,000 + 90,000",
        classes="10",
        licence="CC BY 4.0 (the collection, Edinburgh DataShare); ImageNet's terms for its images",
        citation="L. N. Darlow, E. J. Crowley, A. Antoniou, A. J. Storkey, CINIC-10 is not ImageNet or CIFAR-10, 2018",
        page="https://datashare.ed.ac.uk/handle/10283/3192",
        files="the unpacked CINIC-10 folder (train/, valid/ and test/ with one folder of PNG files a class)",
        reader=read_cinic10,
        sources=(
            Source(
                "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                "md5:6ee4d0c996905fe93221de577967a372",
            ),
        ),
    ),
    DataSet(
        name="sentiment140",
        samples="1,600,000 + 359",
        classes="2",
        licence="no formal license; research use",
        citation="A. Go, R. Bhayani, L. Huang, Twitter sentiment classification using distant supervision, Stanford, "
        "2009",
        page="http://help.sentiment140.com/for-students",
        files="training*.csv of Sentiment140, and testdata*.csv if you have it (plain or .gz)",
        reader=read_sentiment140,
        sources=(
            Source(
                "https://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",
                "sha256:004a3772c8a7ff9bbfeb875880f47f0679d93fc63e5cf9cff72d54a8a6162e57",
            ),
        ),
        options=TEXT_OPTIONS | {"split"},
    ),
    DataSet(
        name="mind",
        samples="51,282 (MIND-small, train)",
        classes="17",
        licence="Microsoft Research License Terms, non-commercial research only",
        citation="F. Wu et al., MIND: a large-scale dataset for news recommendation, ACL 2020",
        page="https://msnews.github.io",
        files="news.tsv of one part of MIND (plain or .gz)",
        reader=read_mind,
        options=TEXT_OPTIONS,
    ),
    DataSet(
        name="amazon",
        samples="198,502 Beauty, 167,597 Toys (2014)",
        classes="5",
        licence="no formal license; research use, cite the papers",
        citation="J. McAuley et al., Image-based recommendations on styles and substitutes, SIGIR 2015; "
        "J. Ni, J. Li, J. McAuley, Justifying recommendations using distantly-labeled reviews, EMNLP 2019",
        page="https://jmcauley.ucsd.edu/data/amazon/",
        files="a review file such as reviews_Toys_and_Games_5.json.gz or All_Beauty_5.json.gz",
        reader=read_amazon,
        options=TEXT_OPTIONS | {"split"},
        raw="file",
    ),
    DataSet(
        name="femnist",
        samples="about 800,000 of 3,500 writers",
        classes="62",
        licence="no formal license (from NIST Special Database 19); LEAF: BSD 2-clause",
        citation=LEAF,
        page="https://leaf.cmu.edu",
        files="LEAF's train/*.json and test/*.json, or TFF's fed_emnist_train.h5 and fed_emnist_test.h5",
        reader=read_femnist,
        sources=(
            Source(
                "https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2",
                "sha256:fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
            ),
        ),
    ),
    DataSet(
        name="shakespeare",
        samples="4,226,150 of 1,129 roles",
        classes=str(len(LETTERS)),
        licence="public domain; LEAF: BSD 2-clause",
        citation=f"B. McMahan et al., Communication-efficient learning of deep networks, 2017; {LEAF}",
        page="https://leaf.cmu.edu",
        files="LEAF's train/*.json and test/*.json",
        reader=read_shakespeare,
    ),
    OWN_ARRAYS,
    DataSet(
        name="imagefolder",
        files="DIR/train/CLASS/* and DIR/test/CLASS/*, or DIR/CLASS/* (a part is then held out for testing)",
        reader=read_image_folder,
        options=frozenset({"image_size"}),
    ),
    DataSet(
        name="digits",
        samples="1,442 + 355",
        classes="10",
        licence="CC BY 4.0",
        citation="E. Alpaydin, C. Kaynak, Optical recognition of handwritten digits, UCI Machine Learning Repository, "
        "1998",
        page="https://archive.ics.uci.edu/dataset/80",
        reader=read_digits,
        raw="none",
    ),
)
DATASETS: dict[str, DataSet] = {data_set.name: data_set for data_set in ALL}


def data_set(name: str, given: Mapping[str, Any] | None = None) -> DataSet:
    """Return the data set of this name, or the one that a custom reader reads with the given options.

    A custom reader is a function (raw, *, options) -> arrays by name, or a `RawDataset`. `raw` is the path given with
    --raw; a reader without it reads no files. The arrays have the names used in an .npz file of the data set `arrays`.
    """
    if ":" in name:
        part = resolve("data set", name)
        return DataSet(
            name=name,
            licence=UNKNOWN,
            citation=UNKNOWN,
            files="what your reader reads",
            reader=lambda _, raw, options, tally: read_own(part, given or {}, raw, options, tally),
            options=OF_ARRAYS - part.fields.keys(),
            raw="folder" if reads_files(part) else "none",
            own=part,
        )
    if name not in DATASETS:
        listed = f"there are {', '.join(DATASETS)} (`list` explains them)"
        raise UserError(f"there is no data set {name!r}; {suggestion(name, DATASETS, listed, 0.6)}")
    return DATASETS[name]


def reads_files(part: Component) -> bool:
    """Check whether a reader takes the path given with --raw."""
    kinds = [parameter.kind for parameter in inspect.signature(part.object).parameters.values()]
    return Parameter.POSITIONAL_ONLY in kinds or Parameter.POSITIONAL_OR_KEYWORD in kinds


def read_own(part: Component, given: Mapping[str, Any], raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read a data set with a custom reader."""
    reader = part.make(given)
    with calling(part):
        found = reader(raw) if reads_files(part) else reader()
    if isinstance(found, RawDataset):
        if replace(options, split="rows") != ReadOptions():
            raise UserError(f"{part.name} gives a RawDataset: --task and what else says what arrays mean do nothing")
        return hold_out_test(found, options.split, tally)
    if not isinstance(found, Mapping):
        problem = f"returned a {type(found).__name__}: return a dictionary of arrays, {{'x': ..., 'y': ...}}"
        raise refuse_result(part, f"{problem}, or a data_prep.raw.RawDataset")
    if unknown := sorted(name for name in map(str, found) if not is_meant(name, options)):
        raise refuse_result(part, f"returned an array {unknown[0]!r}. Return only {', '.join(MEMBERS)}")
    if missing := [name for name in ("x", "y") if name not in found]:
        raise refuse_result(part, f"returned no array {missing[0]!r}. Return x and y")
    with calling(part):  # its result may not convert to an array, e.g. a tensor on another device
        arrays = {str(name): np.asarray(values) for name, values in found.items()}
    data = of_arrays(part.name, arrays, options).data_set(replace(OWN_ARRAYS, name=part.name), options, tally)
    return hold_out_test(data, options.split, tally)


def _register(data: DataSet) -> None:
    """Make a built-in data set a component (raw, *, options) -> `RawDataset`."""

    def read(raw: Path = Path(), **options: Any) -> RawDataset:
        return data.read(Path(raw), ReadOptions(**options), Tally())

    options = data.reading.own
    positional = [] if data.raw == "none" else [Parameter("raw", Parameter.POSITIONAL_OR_KEYWORD)]
    keywords = [Parameter(name, Parameter.KEYWORD_ONLY, default=field.default) for name, field in options.items()]
    read.__name__ = read.__qualname__ = data.name
    read.__annotations__ = {name: Annotated[field.annotation, field] for name, field in options.items()}
    read.__signature__ = Signature([*positional, *keywords])  # type: ignore[attr-defined]
    size = "your own data" if data.samples == "yours" else data.size
    files = f"; --raw: {data.files}" if data.files else ""
    read.__doc__ = f"{size[:1].upper()}{size[1:]}{files}."
    register("data set", data.name)(read)


for _data in ALL:
    _register(_data)
