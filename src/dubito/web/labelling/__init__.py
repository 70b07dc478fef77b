"""A person labels what a model asks for, on a small local web page: what `dubito label` runs.

`task` reads the data, `shown` makes inputs fit to look at, `journal` keeps what was said, `session` fits and asks in the background,
and `server` with `page` is what a browser sees.
"""

from dubito.web.labelling.journal import Answer as Answer
from dubito.web.labelling.journal import Journal as Journal
from dubito.web.labelling.server import Server as Server
from dubito.web.labelling.session import Session as Session
from dubito.web.labelling.task import Task as Task
from dubito.web.labelling.task import task as task
