"""The calls of CacheService that say how things stand, and change nothing."""

from collections.abc import Sequence

from kvtier._pb import cache_pb2 as pb
from kvtier.client.daemon_connection import DaemonConnection


class ObserverClient(DaemonConnection):
    """One connection to the daemon; see `AdminClient`, which has the calls that change something too."""

    def status(self) -> pb.DaemonStatus:
        """Return the daemon's status; `namespaces` returns fingerprints."""
        reply: pb.DaemonStatus = self._call(self._stub.GetStatus, pb.GetStatusRequest())
        return reply

    def advise(self, max_bytes: int = 0) -> pb.Advice:
        """Return what is worth a pin under a budget; 0: that of automatic pins."""
        reply: pb.Advice = self._call(self._stub.GetAdvice, pb.GetAdviceRequest(max_bytes=max_bytes))
        return reply

    def explain(self, request: pb.ExplainRequest) -> pb.Explanation:
        """Return why a request was restored what it was, or what one with some tokens would get now."""
        reply: pb.Explanation = self._call(self._stub.Explain, request)
        return reply

    def recent_requests(self, request: pb.ListRecentRequestsRequest) -> Sequence[pb.RecentRequest]:
        """Return requests that ended lately, the last one first."""
        reply: pb.ListRecentRequestsResponse = self._call(self._stub.ListRecentRequests, request)
        return reply.requests

    def check_ready(self, request: pb.ReadyRequest) -> pb.Readiness:
        """Return whether prompts can be restored now."""
        reply: pb.Readiness = self._call(self._stub.CheckReady, request)
        return reply

    def chunk_map(self, name: str, namespace_id: str = "") -> pb.ChunkMap:
        """Return where each chunk of a prompt lies."""
        request = pb.GetChunkMapRequest(name=name, namespace_id=namespace_id)
        reply: pb.ChunkMap = self._call(self._stub.GetChunkMap, request)
        return reply

    def list_page(self, request: pb.ListPromptsRequest) -> pb.ListPromptsResponse:
        """Return one page of the prompts, by name."""
        reply: pb.ListPromptsResponse = self._call(self._stub.ListPrompts, request)
        return reply

    def remote(self, *, with_hosts: bool) -> pb.RemoteStatus:
        """Return how the daemon stands with the store that hosts share."""
        reply: pb.RemoteStatus = self._call(self._stub.GetRemote, pb.GetRemoteRequest(with_hosts=with_hosts))
        return reply
