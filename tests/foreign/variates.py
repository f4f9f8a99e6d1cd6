from fedmpi import LocalAlgorithm


class Variates(LocalAlgorithm):
    """Control variates, damped: the correction is scaled, the client's variate is a moving average."""

    client_state = ("c",)
    server_state = ("c",)
    sums = ("dc",)

    def __init__(self, *, strength: float = 0.8, memory: float = 0.0):
        self.strength = strength
        self.memory = memory

    def correction(self, client, server, generator):
        return self.strength * (server.c - client.c)

    def finish(self, client, server, work, generator):
        old = client.c
        fresh = old - server.c - work.delta / (work.steps * work.lr)
        client.c = self.memory * old + (1 - self.memory) * fresh
        return {"dc": client.c - old}

    def server_step(self, server, update, sums, totals, generator):
        server.c = server.c + sums["dc"] / totals.population
        return update
