"""A local algorithm with state: local.algorithm = "algorithm:Scaffold"."""

from fedmpi import LocalAlgorithm


class Scaffold(LocalAlgorithm):
    """Control variates against client drift (Karimireddy et al. 2020, Algorithm 1, option II)."""

    client_state = ("c",)
    server_state = ("c",)
    sums = ("dc",)

    def correction(self, client, server, generator):
        return server.c - client.c

    def finish(self, client, server, work, generator):
        before = client.c
        client.c = before - server.c - work.delta / (work.steps * work.lr)
        return {"dc": client.c - before}

    def server_step(self, server, update, sums, totals, generator):
        server.c = server.c + sums["dc"] / totals.population
        return update
