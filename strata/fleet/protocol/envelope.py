"""A message of Strata's in one of Flower's: one record with one array of raw bytes."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, RecordDict

from strata.fleet.protocol.codec import Malformed

RECORD, ARRAY, FORM = "strata", "message", "strata.bytes"


def content(data: bytes) -> RecordDict:
    return RecordDict({RECORD: ArrayRecord({ARRAY: Array("uint8", (len(data),), FORM, data)})})


def payload(record: RecordDict) -> bytes:
    arrays = record.array_records.get(RECORD)
    if arrays is None or list(record) != [RECORD] or list(arrays) != [ARRAY]:
        raise Malformed("this is not a message of Strata's")
    array = arrays[ARRAY]
    if array.dtype != "uint8" or array.stype != FORM or tuple(array.shape) != (len(array.data),):
        raise Malformed("this is not a message of Strata's")
    return array.data
