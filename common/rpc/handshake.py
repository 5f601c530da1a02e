"""How two peers prove the cluster's key to each other, apart from the wire.

    dialer                                   listener
      Greet(its nonce)               ->
                                     <-      nonce of a session, proof over both nonces
      any call, proof in its metadata ->     admitted, once

The listener proves first: a dialer sends nothing that matters to who can't. A session's key is made of the cluster's
key and both nonces. A call's proof covers the method and a number that counts the session's calls, so a proof that
was overheard is worth nothing, neither again nor for another method. What a call carries is not covered: who reads
or alters the wire is kept out by TLS.
"""

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from common.cluster_key import DIGEST_BYTES, ClusterKey, sign

NONCE_BYTES = 32
COUNTER_BYTES = 8
HEADER = "kvrelay-proof-bin"
HEADER_BYTES = NONCE_BYTES + COUNTER_BYTES + DIGEST_BYTES
SESSION_S = 300.0  # then a dialer begins a new one
MAX_SESSIONS = 4096  # of each kind, that a listener remembers; the oldest go first
WINDOW = 1024  # calls of a session that may overtake each other
SESSION, LISTENER, CALL = b"session", b"listener", b"call"


class CallSigner:
    """The dialer's end of one session."""

    def __init__(self, secret: bytes, session: bytes, now: float) -> None:
        self.began_s = now
        self._secret = secret
        self._session = session
        self._calls = 0

    @classmethod
    def meet(cls, key: ClusterKey, mine: bytes, theirs: bytes, proof: bytes, now: float) -> "CallSigner | None":
        """From what the listener answered to my nonce; None: it has another key, or none."""
        if len(theirs) != NONCE_BYTES:
            return None
        secret = key.sign(SESSION, mine, theirs)
        if not hmac.compare_digest(proof, sign(secret, LISTENER)):
            return None
        return cls(secret, theirs, now)

    def header(self, method: str) -> bytes:
        """The proof for one call, to be sent under HEADER."""
        self._calls += 1
        counter = self._calls.to_bytes(COUNTER_BYTES, "big")
        return self._session + counter + sign(self._secret, CALL, counter, method.encode())


@dataclass(slots=True)
class HeardSession:
    """The listener's end of one session."""

    secret: bytes
    began_s: float
    highest: int = 0  # number of a call that came
    seen: int = 0  # bit i: call highest - i came

    def take(self, number: int) -> bool:
        """Whether this call comes for the first time, as far as the window tells."""
        ahead = number - self.highest
        if ahead > 0:
            self.seen = (self.seen << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self.highest = number
            return True
        if -ahead >= WINDOW or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True


class CallVerifier:
    """The listener's end of all sessions.

    Sessions that were only asked for are kept apart, few and shortly: strangers can make no others.
    """

    def __init__(self, key: ClusterKey, clock: Callable[[], float], patience_s: float) -> None:
        """`patience_s`: how long a dialer may take from the greeting to its first call."""
        self._key = key
        self._clock = clock
        self._patience_s = patience_s
        self._asked: OrderedDict[bytes, HeardSession] = OrderedDict()
        self._proven: OrderedDict[bytes, HeardSession] = OrderedDict()

    @property
    def num_sessions(self) -> int:
        """Asked for and proven."""
        return len(self._asked) + len(self._proven)

    def greet(self, nonce: bytes) -> tuple[bytes, bytes]:
        """(nonce, proof) for a dialer that sent its nonce. Raises ValueError for what is none."""
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        mine = secrets.token_bytes(NONCE_BYTES)
        session = HeardSession(self._key.sign(SESSION, nonce, mine), self._clock())
        self._add(self._asked, mine, session, self._patience_s)
        return mine, sign(session.secret, LISTENER)

    def admit(self, method: str, header: bytes) -> str:
        """ "", or why a call is refused."""
        if len(header) != HEADER_BYTES:
            return "this worker asks for the cluster key" if not header else "the proof is malformed"
        name, counter = header[:NONCE_BYTES], header[NONCE_BYTES:-DIGEST_BYTES]
        session, life_s = self._proven.get(name), 2 * SESSION_S
        if session is None:
            session, life_s = self._asked.get(name), self._patience_s
        if session is None or self._clock() - session.began_s > life_s:
            return "the session is over, or was never begun"
        if not hmac.compare_digest(header[-DIGEST_BYTES:], sign(session.secret, CALL, counter, method.encode())):
            return "the proof is wrong: that is another cluster's key"
        if self._asked.pop(name, None):
            self._add(self._proven, name, session, 2 * SESSION_S)
        return "" if session.take(int.from_bytes(counter, "big")) else "the proof was used before"

    def _add(
        self, sessions: OrderedDict[bytes, HeardSession], name: bytes, session: HeardSession, life_s: float
    ) -> None:
        now = self._clock()
        while sessions:
            oldest = next(iter(sessions.values()))
            if len(sessions) < MAX_SESSIONS and now - oldest.began_s <= life_s:
                break
            sessions.popitem(last=False)
        sessions[name] = session
