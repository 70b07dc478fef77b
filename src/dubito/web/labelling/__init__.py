"""A person labels the inputs that a model asks for, on a local web page; `dubito label` runs it.

Read in this order: `task` reads the data and shows inputs to a person, `journal` saves the answers, `session` fits and asks in the
background, and `server` is what the browser sees.
"""

from dubito.web.labelling.journal import Answer as Answer
from dubito.web.labelling.journal import Journal as Journal
from dubito.web.labelling.server import Server as Server
from dubito.web.labelling.session import Session as Session
from dubito.web.labelling.task import Task as Task
from dubito.web.labelling.task import task as task
