"""Declare an application whose settings are in a table."""

import os
from pathlib import Path

import trio

from celery5 import App
from celery5.examples.own_configuration.table import TableConfiguration

table = TableConfiguration(Path(os.environ.get("SHOP_SETTINGS", "settings.sqlite")))
app = App(os.environ.get("SHOP_APP", "shop"), config=table)


@app.task
async def pack(seconds: float) -> None:
    """Pack one parcel, which takes a while."""
    await trio.sleep(seconds)
