"""The papers' tasks; importing this package adds them to `TASKS`."""

from subquad.research.papers.tasks.clusters import Clusters
from subquad.research.papers.tasks.forecast import Forecast
from subquad.research.papers.tasks.image import Image
from subquad.research.papers.tasks.listops import ListOps
from subquad.research.papers.tasks.masked_copy import MaskedCopy
from subquad.research.papers.tasks.match import Match
from subquad.research.papers.tasks.speech import Speech
from subquad.research.training.tasks import TASKS

TASKS.update({task.name: task for task in (MaskedCopy, Speech, ListOps, Image, Match, Forecast, Clusters)})
