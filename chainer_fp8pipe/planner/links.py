
from ..mpi.link_speed import measure_links, measure_exchange
from ..mpi.groups import nodes_of
from ..planning.job.job_profile import NetworkFigures, Figure
def measure_network(comm):
    s = measure_exchange(comm)
    return NetworkFigures(tuple(nodes_of(comm)), Figure(s.latency), Figure(s.bandwidth), local_latency=Figure(s.latency), local_rate=Figure(s.bandwidth), message_cost=Figure(5e-6), byte_cost=Figure(1e-10))
