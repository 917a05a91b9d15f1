"""The web application: which path is answered by whom.

Knows the modules of this package; must not know what they answer.
"""

from __future__ import annotations

from starlette.applications import Starlette

from baton.config import ClusterConfig
from router.desk import Desk
from router.http import openai, operations


def build_app(config: ClusterConfig, desk: Desk) -> Starlette:
    """All routes of one router."""
    return Starlette(routes=[*openai.routes(config, desk), *operations.routes(config, desk)])
