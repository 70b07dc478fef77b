"""Readers of the standard data sets and of a user's own tables. Nothing is downloaded.

`digits` comes with scikit-learn. The others read the published files from the folder named by the environment variable
DUBITO_DATA, or by the argument `root`; each reader's docstring says where the files come from and under which licence.
"""

from dubito.evaluation.data.camvid import camvid as camvid
from dubito.evaluation.data.examples import Examples as Examples
from dubito.evaluation.data.examples import Split as Split
from dubito.evaluation.data.images import cifar10 as cifar10
from dubito.evaluation.data.images import cifar10h as cifar10h
from dubito.evaluation.data.images import digits as digits
from dubito.evaluation.data.images import fashion_mnist as fashion_mnist
from dubito.evaluation.data.images import kmnist as kmnist
from dubito.evaluation.data.images import label_entropy as label_entropy
from dubito.evaluation.data.images import mnist as mnist
from dubito.evaluation.data.images import notmnist as notmnist
from dubito.evaluation.data.sentences import Reviews as Reviews
from dubito.evaluation.data.sentences import Vocabulary as Vocabulary
from dubito.evaluation.data.sentences import polarity as polarity
from dubito.evaluation.data.table import Table as Table
from dubito.evaluation.data.table import detect as detect
from dubito.evaluation.data.table import table as table
from dubito.evaluation.data.uci import moments as moments
from dubito.evaluation.data.uci import standardize as standardize
from dubito.evaluation.data.uci import uci as uci
