"""Where the files of the data sets are."""

import os
from pathlib import Path


def locate(*parts: str, root: str | Path | None = None) -> Path:
    """The path of a file or folder of a data set, under `root` or else under the folder named by DUBITO_DATA.

    >>> locate("mnist", "train-images-idx3-ubyte.gz", root="nowhere")
    Traceback (most recent call last):
    FileNotFoundError: nowhere/mnist/train-images-idx3-ubyte.gz is not there: put the published file in that place, ...
    """
    folder = root or os.environ.get("DUBITO_DATA")
    if not folder:
        wanted = "/".join(parts)
        raise FileNotFoundError(
            f"no folder of data sets is known: set the environment variable DUBITO_DATA to that which has {wanted}, or give root="
        )
    path = Path(folder, *parts)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: put the published file in that place, "
            "or name another folder with root= or the environment variable DUBITO_DATA"
        )
    return path
