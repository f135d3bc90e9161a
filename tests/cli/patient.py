"""``weft`` that leaves the other ranks time to answer, however busy the machine is."""

from weft.__main__ import start
from weft.elastic import crew

if __name__ == "__main__":
    crew.GRACE_S = 600.0
    start()
