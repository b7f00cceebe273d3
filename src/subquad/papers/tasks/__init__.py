"""The papers' tasks; importing this package adds them to `TASKS`."""

from subquad.papers.tasks.clusters import Clusters
from subquad.papers.tasks.forecast import Forecast
from subquad.papers.tasks.genome import NextBase
from subquad.papers.tasks.image import Image
from subquad.papers.tasks.listops import ListOps
from subquad.papers.tasks.masked_copy import MaskedCopy
from subquad.papers.tasks.match import Match
from subquad.papers.tasks.speech import Speech
from subquad.training.tasks import TASKS

TASKS.update({task.name: task for task in (MaskedCopy, NextBase, Speech, ListOps, Image, Match, Forecast, Clusters)})
