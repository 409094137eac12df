"""Verifiers as a user could write them, good and bad; named by import path in the tests."""

import ctypes
import os
import re
import time


def shout(answer, ground_truth, details):
    print("noise on standard output")
    return 0.5 if answer.isupper() and details.get("loud", True) else 0.0


def sleeps(answer, ground_truth, details):
    time.sleep(float(answer))
    return 1.0


def backtracks(answer, ground_truth, details):
    # One call into C that holds the interpreter lock for ever: no thread or signal handler of Python can end it.
    return float(bool(re.match(r"(a+)+$", "a" * 60 + "!")))


def dies(answer, ground_truth, details):
    if answer == "exit":
        os._exit(3)
    return ctypes.string_at(0)


def hungry(answer, ground_truth, details):
    return float(len(bytearray(64 * 2**30)))


def raises(answer, ground_truth, details):
    if answer == "quit":
        raise SystemExit(1)
    raise LookupError("no such answer")


def returns(answer, ground_truth, details):
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "one": 1, "true": True}[answer]


no_function = 3
