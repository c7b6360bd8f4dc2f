"""Secure aggregation: a sum over devices of which the server sees no part. SecAgg+ with Flower's own primitives.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017; Bell et al., CCS
2020, here with every device as every other's neighbour. Four stages, all through the server:

    keys      each device sends two public keys, made for this sum alone
    shares    each shares the seed of its own mask and its first private key among all (Shamir), encrypted to each
    masked    each adds to its quantised values its own mask, and for each other device one that cancels out between
              the two
    reveal    of devices in the sum the shares of their seeds, of those that were lost after `shares` the shares of
              their keys: never both of one device. With `threshold` of them the masks that are left can be taken off

Flower's `pseudo_rand_gen` folds a key to 32 bits and seeds a Mersenne Twister: such masks can be guessed. Masks are
AES-256 in counter mode instead, as Bonawitz et al. say, by `cryptography`; each key makes one stream and no other.
Shares and seeds are committed to by SHA-256, so a share that is not as it was dealt is known for a lie, and whose.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)
from numpy.typing import NDArray

from strata.core.errors import BadInput
from strata.fleet.protocol.codec import Malformed
from strata.fleet.protocol.settings import FEWEST_SUMMED, MOST_SUMMED

FEWEST, MOST = FEWEST_SUMMED, MOST_SUMMED  # with more, the sum of what they send might pass the modulus, 2^32
TARGET = 1 << 22  # steps of a quantised value
SEED = 32  # bytes
LONGEST_KEY, LONGEST_SHARE = 1024, 4096  # characters of a public key, and of two encrypted shares
BLOCK = 1 << 22  # bytes of a mask that are made at a time

Values = NDArray[np.float64]
Masked = NDArray[np.uint32]
Keys = tuple[bytes, bytes]  # public: the first for masks, the second to encrypt shares
Digests = tuple[str, str]  # of the shares of the seed and of the first private key


def threshold_of(devices: int, fewest: int) -> int:
    """Shares that recover a secret: more than half, so that no two halves of the fleet are told different things, one
    that a device is in the sum and the other that it was lost."""
    return max(fewest, devices // 2 + 1)


def step_of(clip: float) -> float:
    """The width of a quantised value's step; what a device sends is off by less than this, and so is the mean."""
    return 2 * clip / TARGET


def mask_of(key: bytes, length: int) -> Masked:
    """As many uniform numbers as the key's stream gives."""
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    made = np.empty(length, dtype="<u4")
    part = BLOCK // made.itemsize
    for start in range(0, length, part):
        there = made[start : start + part]
        there[:] = np.frombuffer(stream.update(bytes(there.nbytes)), dtype="<u4")
    return made.astype(np.uint32, copy=False)


def pair_key(private: bytes, public: bytes) -> bytes:
    return base64.urlsafe_b64decode(generate_shared_key(bytes_to_private_key(private), bytes_to_public_key(public)))


def quantised(values: Values, clip: float, seed: int) -> Masked:
    """Rounded at random to a step above or below, so that the mean is right; the same for the same seed."""
    before = np.random.get_state()
    np.random.seed(seed % 2**32)  # Flower's rounding draws from numpy's own generator
    try:
        (made,) = quantize([values], clip, TARGET)
    finally:
        np.random.set_state(before)
    return made.astype(np.uint32)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: Any, longest: int = LONGEST_SHARE) -> bytes:
    if not isinstance(text, str) or not 0 < len(text) <= longest:
        raise Malformed("a key or share is not one")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Malformed("a key or share is not one") from None


def _numbered(values: Any) -> dict[int, Any]:
    """An object whose keys are device numbers."""
    if not isinstance(values, dict) or len(values) > MOST:
        raise Malformed("what is said of devices is not said by their numbers")
    if not all(isinstance(key, str) and len(key) < 16 and key.isascii() and key.isdigit() for key in values):
        raise Malformed("what is said of devices is not said by their numbers")
    made = {int(key): value for key, value in values.items()}
    if len(made) != len(values):
        raise Malformed("a device is named twice")
    return made


def _numbers(values: Any) -> list[int]:
    if not isinstance(values, list) or len(values) > MOST or not all(type(value) is int for value in values):
        raise Malformed("a list of devices is not one")
    if len(set(values)) != len(values):
        raise Malformed("a device is named twice")
    return values


def _keys(value: Any) -> Keys:
    if not isinstance(value, list) or len(value) != 2 or value[0] == value[1]:
        raise Malformed("there are not two public keys")
    found = []
    for text in value:
        if not isinstance(text, str) or not 0 < len(text) <= LONGEST_KEY:
            raise Malformed("a public key is not one")
        try:
            key = bytes_to_public_key(text.encode("ascii"))
        except (ValueError, UnsupportedAlgorithm):
            raise Malformed("a public key is not one") from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            raise Malformed("a public key is of another kind")
        found.append(public_key_to_bytes(key))
    return found[0], found[1]


def _digests(value: Any) -> Digests:
    if not isinstance(value, list) or len(value) != 2 or not all(_is_digest(one) for one in value):
        raise Malformed("what shares are committed to by is not two digests")
    return value[0], value[1]


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and all(c in "0123456789abcdef" for c in value)


# --- a device -----------------------------------------------------------------------------------------------------


@dataclass
class Member:
    """A device's side of one sum. `fewest`: devices below which it gives nothing away, whatever the server says."""

    number: int
    fewest: int = FEWEST
    stage: str = "keys"
    secrets: tuple[bytes, bytes] = (b"", b"")  # the private keys
    own: Keys = (b"", b"")
    seed: bytes = b""  # of its own mask
    threshold: int = 0
    peers: dict[int, Keys] = field(default_factory=dict)  # all that were there at `shares`, itself too
    shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # of each one's seed and key, that it holds
    others: list[int] = field(default_factory=list)  # with whom it is masked

    @classmethod
    def begin(cls, number: int, fewest: int = FEWEST) -> Member:
        pairs = [generate_key_pairs() for _ in range(2)]
        first, second = (private_key_to_bytes(private) for private, _ in pairs)
        own = (public_key_to_bytes(pairs[0][1]), public_key_to_bytes(pairs[1][1]))
        return cls(number, max(FEWEST, fewest), "shares", (first, second), own)

    def keys(self) -> dict[str, Any]:
        return {"keys": [key.decode("ascii") for key in self.own]}

    def share(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Of its secrets one share for each, once it has seen who takes part."""
        self._at("shares")
        self.peers = {number: _keys(value) for number, value in _numbered(meta.get("keys")).items()}
        threshold, devices = meta.get("threshold"), len(self.peers)
        if type(threshold) is not int or not max(self.fewest, devices // 2 + 1) <= threshold <= devices:
            raise BadInput(
                f"the server would sum over {threshold} of {devices} devices: this one takes part in sums over at least"
                f" {self.fewest}, and over more than half of those asked"
            )
        if self.peers.get(self.number) != self.own:
            raise BadInput("the server does not name this device's own keys among those of the sum")
        if len({key for keys in self.peers.values() for key in keys}) != 2 * devices:
            raise BadInput("the server names one public key for two devices")
        self.threshold, self.seed, self.stage = threshold, os.urandom(SEED), "masked"
        dealt = {
            number: pair
            for number, *pair in zip(
                sorted(self.peers),
                create_shares(self.seed, threshold, devices),
                create_shares(self.secrets[0], threshold, devices),
                strict=True,
            )
        }
        self.shares = {self.number: (dealt[self.number][0], dealt[self.number][1])}
        return {
            "shares": {
                str(number): self._sealed(number, dealt[number])
                for number in sorted(self.peers)
                if number != self.number
            },
            "digests": {str(number): [digest(share) for share in pair] for number, pair in dealt.items()},
            "seed": digest(self.seed),
        }

    def _sealed(self, number: int, pair: list[bytes]) -> str:
        key = generate_shared_key(bytes_to_private_key(self.secrets[1]), bytes_to_public_key(self.peers[number][1]))
        return encrypt(key, share_keys_plaintext_concat(self.number, number, *pair)).decode("ascii")

    def receive(self, meta: Mapping[str, Any]) -> list[int]:
        """Takes the others' shares; those of whom it got none that is as it was dealt are the answer."""
        self._at("masked")
        sealed, told = _numbered(meta.get("shares")), _numbered(meta.get("digests"))
        self.others = sorted(sealed)
        if self.number in sealed or not set(sealed) <= set(self.peers) or set(told) != set(sealed):
            raise BadInput("the server hands on shares of devices that are not in the sum")
        if len(sealed) + 1 < self.threshold:
            raise BadInput(f"of {len(self.peers)} devices {len(sealed) + 1} are left, fewer than {self.threshold}")
        wrong = []
        for number in self.others:
            pair = self._opened(number, sealed[number])
            if pair is None or tuple(map(digest, pair)) != _digests(told[number]):
                wrong.append(number)
            else:
                self.shares[number] = pair
        return wrong

    def _opened(self, number: int, token: Any) -> tuple[bytes, bytes] | None:
        if not isinstance(token, str) or len(token) > LONGEST_SHARE:
            return None
        key = generate_shared_key(bytes_to_private_key(self.secrets[1]), bytes_to_public_key(self.peers[number][1]))
        try:
            source, goal, seed, private = share_keys_plaintext_separate(decrypt(key, token.encode()))
        except (InvalidToken, ValueError):
            return None
        return (seed, private) if (source, goal) == (number, self.number) else None

    def mask(self, values: Masked) -> Masked:
        """What is sent in place of the values; once, and the secrets behind it are of no further use."""
        self._at("masked")
        if not self.others:
            raise BadInput("there is nobody to be masked with")
        made = values + mask_of(self.seed, len(values))
        for number in self.others:
            pairwise = mask_of(pair_key(self.secrets[0], self.peers[number][0]), len(values))
            made = made + pairwise if self.number > number else made - pairwise
        self.stage, self.seed, self.secrets = "reveal", b"", (b"", b"")
        return made

    def reveal(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Shares of the seeds of who is in the sum, and of the keys of who was lost."""
        self._at("reveal")
        active, dead = set(_numbers(meta.get("active"))), set(_numbers(meta.get("dead")))
        known = {self.number, *self.others}
        if active & dead or not active | dead <= known or self.number not in active:
            raise BadInput("the server asks for both secrets of a device, or for those of one that is not in the sum")
        if len(active) < self.threshold:
            raise BadInput(f"the server would sum over {len(active)} devices, fewer than {self.threshold}")
        self.stage = "done"
        return {
            "seeds": {str(number): _text(self.shares[number][0]) for number in sorted(active & set(self.shares))},
            "keys": {str(number): _text(self.shares[number][1]) for number in sorted(dead & set(self.shares))},
        }

    def _at(self, stage: str) -> None:
        if self.stage != stage:
            raise BadInput(f"the server asks for {stage} of a sum, out of turn: {self.stage} is next")

    def to_json(self) -> dict[str, Any]:
        """For the time between two messages, on the device itself."""
        return {
            "number": self.number,
            "fewest": self.fewest,
            "stage": self.stage,
            "secrets": [_text(key) for key in self.secrets],
            "own": [_text(key) for key in self.own],
            "seed": _text(self.seed),
            "threshold": self.threshold,
            "peers": {str(number): [_text(key) for key in keys] for number, keys in self.peers.items()},
            "shares": {str(number): [_text(one) for one in pair] for number, pair in self.shares.items()},
            "others": self.others,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Member:
        def pairs(found: Mapping[str, list[str]]) -> dict[int, tuple[bytes, bytes]]:
            return {int(number): pair(texts) for number, texts in found.items()}

        def pair(texts: list[str]) -> tuple[bytes, bytes]:
            first, second = (base64.b64decode(text) for text in texts)
            return first, second

        return cls(
            number=values["number"],
            fewest=values["fewest"],
            stage=values["stage"],
            secrets=pair(values["secrets"]),
            own=pair(values["own"]),
            seed=base64.b64decode(values["seed"]),
            threshold=values["threshold"],
            peers=pairs(values["peers"]),
            shares=pairs(values["shares"]),
            others=list(values["others"]),
        )


# --- the server ---------------------------------------------------------------------------------------------------


class SumFailed(Exception):
    """There is no sum. `liars` are known to have lied, `suspects` are those among whom somebody may have."""

    def __init__(self, reason: str, liars: Mapping[int, str] | None = None, suspects: Iterable[int] = ()) -> None:
        super().__init__(reason)
        self.liars, self.suspects = dict(liars or {}), sorted(set(suspects))


@dataclass
class Collector:
    """The server's side of one sum of vectors of `length` values. What it takes is checked for form (Malformed)."""

    fewest: int
    length: int
    clip: float
    keys: dict[int, Keys] = field(default_factory=dict)
    threshold: int = 0
    sealed: dict[int, dict[int, str]] = field(default_factory=dict)  # by dealer, for each other
    digests: dict[int, dict[int, Digests]] = field(default_factory=dict)  # by dealer, of each one's shares
    seeds: dict[int, str] = field(default_factory=dict)  # digests
    masked: dict[int, Masked] = field(default_factory=dict)
    revealed: dict[int, tuple[dict[int, bytes], dict[int, bytes]]] = field(default_factory=dict)
    complaints: dict[int, list[int]] = field(default_factory=dict)  # who says that these dealt no proper share
    lied: dict[int, str] = field(default_factory=dict)  # in their shares, in a sum that was made all the same

    def take_keys(self, number: int, meta: Mapping[str, Any]) -> None:
        keys = _keys(meta.get("keys"))
        if any(key in known for key in keys for known in self.keys.values()):
            raise Malformed("it sent another device's public key")
        self.keys[number] = keys

    def for_shares(self) -> dict[str, Any]:
        """To all whose keys are here, who are the devices of the sum from now on."""
        self.threshold = threshold_of(len(self.keys), self.fewest)
        return {
            "keys": {str(number): [key.decode("ascii") for key in keys] for number, keys in self.keys.items()},
            "threshold": self.threshold,
        }

    @property
    def begins(self) -> bool:
        return self.fewest <= len(self.keys) <= MOST

    def take_shares(self, number: int, meta: Mapping[str, Any]) -> None:
        sealed, told = _numbered(meta.get("shares")), _numbered(meta.get("digests"))
        if set(sealed) != set(self.keys) - {number} or set(told) != set(self.keys):
            raise Malformed("it did not share its secrets with every other device")
        if not all(isinstance(token, str) and 0 < len(token) <= LONGEST_SHARE for token in sealed.values()):
            raise Malformed("a share is not one")
        if not _is_digest(meta.get("seed")):
            raise Malformed("it does not commit to its mask")
        self.digests[number] = {other: _digests(value) for other, value in told.items()}
        self.sealed[number], self.seeds[number] = sealed, str(meta["seed"])

    @property
    def goes_on(self) -> bool:
        return len(self.sealed) >= self.threshold

    def for_masked(self, number: int) -> dict[str, Any]:
        others = [other for other in sorted(self.sealed) if other != number]
        return {
            "shares": {str(other): self.sealed[other][number] for other in others},
            "digests": {str(other): list(self.digests[other][number]) for other in others},
        }

    def take_masked(self, number: int, values: Masked, complaints: Any = ()) -> None:
        if values.shape != (self.length,) or values.dtype != np.uint32:
            raise Malformed(f"it sent {values.shape} masked values, not {self.length}")
        self.complaints[number] = _numbers(list(complaints) if isinstance(complaints, list | tuple) else None)
        self.masked[number] = values

    @property
    def can_end(self) -> bool:
        return len(self.masked) >= self.threshold

    def for_reveal(self) -> dict[str, Any]:
        return {"active": sorted(self.masked), "dead": sorted(set(self.sealed) - set(self.masked))}

    def take_reveal(self, number: int, meta: Mapping[str, Any]) -> None:
        seeds, keys = (
            {other: _bytes(text) for other, text in _numbered(meta.get(name)).items()} for name in ("seeds", "keys")
        )
        asked = self.for_reveal()
        if not set(seeds) <= set(asked["active"]) or not set(keys) <= set(asked["dead"]):
            raise Malformed("it revealed what it was not asked for")
        self.revealed[number] = (seeds, keys)

    def total(self) -> Values:
        """The sum of what the devices whose masked values came have sent, or SumFailed."""
        if len(self.revealed) < self.threshold:
            raise SumFailed(f"{len(self.revealed)} of the {self.threshold} devices that it takes revealed their shares")
        active, dead = sorted(self.masked), sorted(set(self.sealed) - set(self.masked))
        liars: dict[int, str] = {}
        secrets = {number: self._secret(number, 0, liars) for number in active}
        secrets |= {number: self._secret(number, 1, liars) for number in dead}
        if lost := [number for number, secret in secrets.items() if secret is None]:
            disputed = [who for who, wrong in self.complaints.items() if set(wrong) & set(lost)]
            raise SumFailed("the shares that came do not take its masks off", liars, [*lost, *disputed])
        total = np.zeros(self.length, dtype=np.uint32)
        for number in active:
            total += self.masked[number]
            total -= mask_of(secrets[number] or b"", self.length)
        for gone in dead:
            for number in active:
                pairwise = mask_of(pair_key(secrets[gone] or b"", self.keys[number][0]), self.length)
                total = total - pairwise if number > gone else total + pairwise
        if total.size and int(total.max()) > len(active) * TARGET:
            raise SumFailed("it is none that devices could have: one of them sent values of its own", liars, active)
        self.lied = liars
        (made,) = dequantize([total.astype(np.float64)], self.clip, TARGET)
        return np.asarray(made - (len(active) - 1) * self.clip, dtype=np.float64)

    def _secret(self, owner: int, kind: int, liars: dict[int, str]) -> bytes | None:
        """The owner's seed (0) or first private key (1); None where too few shares of it are as they were dealt."""
        good = []
        for number, shares in self.revealed.items():
            share = shares[kind].get(owner)
            if share is None:
                continue
            if digest(share) == self.digests[owner][number][kind]:
                good.append(share)
            else:
                liars[number] = "revealed another share than it was dealt"
        if len(good) < self.threshold:
            return None
        try:
            secret = combine_shares(good[: self.threshold])
            true = digest(secret) == self.seeds[owner] if kind == 0 else _public(secret) == self.keys[owner][0]
        except (ValueError, TypeError, IndexError, UnsupportedAlgorithm):
            true = False
        if true and (kind or len(secret) == SEED):
            return secret
        liars[owner] = "dealt shares of another secret than it uses"
        return None


def _public(private: bytes) -> bytes:
    return public_key_to_bytes(bytes_to_private_key(private).public_key())


def error_bound(devices: int, clip: float) -> float:
    """How far a coordinate of the sum can be from that of the changes themselves, where none exceeds the clip."""
    return devices * step_of(clip)
