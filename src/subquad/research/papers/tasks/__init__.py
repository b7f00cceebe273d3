"""The papers' tasks; importing this package adds them to `TASKS`."""

from subquad.research.papers.tasks.amortised_clustering import Clusters
from subquad.research.papers.tasks.connected_digits import Speech
from subquad.research.papers.tasks.ett_forecast import Forecast
from subquad.research.papers.tasks.image import Image
from subquad.research.papers.tasks.listops import ListOps
from subquad.research.papers.tasks.masked_copy import MaskedCopy
from subquad.research.papers.tasks.match import Match
from subquad.research.training.tasks import TASKS

TASKS.update({task.name: task for task in (MaskedCopy, Speech, ListOps, Image, Match, Forecast, Clusters)})
