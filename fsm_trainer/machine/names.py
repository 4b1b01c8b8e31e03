"""The states, triggers, actions and roles by name; a test holds them and ``states/`` together."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a worker is: one of these, or a role of one's own, such as ``Role("reward_model")``.

    A role of one's own has a lower-case name and its table in a folder of one's own.
    """

    ACTOR = "actor"
    CRITIC = "critic"
    ROLLOUT = "rollout"

    @classmethod
    def _missing_(cls, value: object) -> Role | None:
        own = str.__new__(cls, value)
        own._name_ = own._value_ = str(value)
        return own if own.isidentifier() and own.islower() else None


class State(StrEnum):
    """What a worker holds, by name; ``states/`` says which resources that are."""

    DISCONNECTED = "disconnected"
    SLEEPING = "sleeping"
    AWAKE = "awake"
    CONNECTED = "connected"


class Trigger(StrEnum):
    """What moves a worker; ``SEVER`` and ``FAIL`` are never planned."""

    START = "start"
    WAKE = "wake"
    CONNECT = "connect"
    DISCONNECT = "disconnect"
    SLEEP = "sleep"
    STOP = "stop"
    SEVER = "sever"
    FAIL = "fail"


class LinkState(StrEnum):
    """How a link stands."""

    DOWN = "down"
    OPENING = "opening"
    UP = "up"
    BROKEN = "broken"
