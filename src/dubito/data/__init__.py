"""Readers of the standard data sets and of a user's own tables. Nothing is downloaded.

`digits` comes with scikit-learn. The others read the published files from the folder named by the environment variable
DUBITO_DATA, or by the argument `root`; each reader's docstring says where the files come from and under which licence.
"""

from dubito.data.camvid import camvid as camvid
from dubito.data.cifar10 import cifar10 as cifar10
from dubito.data.cifar10h import cifar10h as cifar10h
from dubito.data.cifar10h import label_entropy as label_entropy
from dubito.data.digits import digits as digits
from dubito.data.examples import Examples as Examples
from dubito.data.examples import Split as Split
from dubito.data.idx import fashion_mnist as fashion_mnist
from dubito.data.idx import kmnist as kmnist
from dubito.data.idx import mnist as mnist
from dubito.data.idx import notmnist as notmnist
from dubito.data.polarity import Reviews as Reviews
from dubito.data.polarity import polarity as polarity
from dubito.data.sentences import Vocabulary as Vocabulary
from dubito.data.table import Table as Table
from dubito.data.table import detect as detect
from dubito.data.table import table as table
from dubito.data.uci import standardize as standardize
from dubito.data.uci import uci as uci
