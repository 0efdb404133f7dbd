"""Wrong programs, each with the finding that has to come first.

Each is what follows `prelude.py`. Most are after a public report, see the page's table.
"""

from typing import NamedTuple


class Wrong(NamedTuple):
    finding: str
    text: str


WRONG = {
    # Replicas.
    "never wrapped": Wrong(
        "not wrapped",
        """
model = make_model()
optimizer = sgd(model)
for x in mine():
    step(model, optimizer, x)
""",
    ),
    "never wrapped, with a sampler, weights drawn anew": Wrong(
        "not wrapped",
        """
torch.seed()
model = make_model()
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
for x, y in loader:
    step(model, optimizer, x)
""",
    ),
    "wrapped, and the model inside is trained": Wrong(
        "around the wrapper",
        """
model = make_model()
ddp = DDP(model)
optimizer = sgd(model)
for x in mine():
    step(model, optimizer, x)
""",
    ),
    "called past its wrapper": Wrong(
        "around the wrapper",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    step(ddp.module, optimizer, x)
""",
    ),
    "called past its wrapper from the third step on": Wrong(
        "around the wrapper",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine()):
    step(ddp if number < 3 else ddp.module, optimizer, x)
""",
    ),
    "wrapped, and only the model inside is kept": Wrong(
        "around the wrapper",
        """
model = DDP(make_model()).module
optimizer = sgd(model)
for x in mine():
    step(model, optimizer, x)
""",
    ),
    "a method of the module": Wrong(
        "around the wrapper",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

    def training_loss(self, x):
        return self(x).square().mean()


ddp = DDP(Net())
optimizer = sgd(ddp)
for x in mine():
    optimizer.zero_grad()
    ddp.module.training_loss(x).backward()
    optimizer.step()
""",
    ),
    "the last micro-batch is called past the wrapper": Wrong(
        "around the wrapper",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine(8)):
    is_last = number % 2 == 1
    with contextlib.nullcontext() if is_last else ddp.no_sync():
        model = ddp.module if is_last else ddp
        (model(x).square().mean() / 2).backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "one of two models is called past its wrapper": Wrong(
        "around the wrapper",
        """
generator, critic = DDP(nn.Linear(3, 4)), DDP(make_model())
of_generator, of_critic = sgd(generator), sgd(critic)
for x in mine():
    with torch.no_grad():
        made = generator(x[:, :3])
    of_critic.zero_grad()
    (critic(x).mean() - critic(made).mean()).backward()
    of_critic.step()
    of_generator.zero_grad()
    critic.module(generator.module(x[:, :3])).mean().backward()
    of_generator.step()
""",
    ),
    "called past its wrapper in a closure": Wrong(
        "around the wrapper",
        """
ddp = DDP(make_model())
optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=3)


def closure():
    optimizer.zero_grad()
    loss = ddp.module(x).square().mean()
    loss.backward()
    return loss


for x in mine():
    optimizer.step(closure)
""",
    ),
    "unfrozen after wrapping": Wrong(
        "not in the mean",
        """
model = make_model()
model[0].requires_grad_(False)
ddp = DDP(model)
model[0].requires_grad_(True)
optimizer = sgd(ddp)
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "unfrozen after wrapping, for an optimizer of its own": Wrong(
        "not in the mean",
        """
model = make_model()
model[0].requires_grad_(False)
ddp = DDP(model)
model[0].requires_grad_(True)
of_head, of_body = sgd(model[2]), sgd(model[0])
for x in mine():
    ddp(x).square().mean().backward()
    clip_grad_norm_(ddp.parameters(), 1.0)
    for optimizer in of_head, of_body:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a head replaced after wrapping": Wrong(
        "not in the mean",
        """
ddp = DDP(make_model())
ddp.module[2] = nn.Linear(8, 2)
optimizer = sgd(ddp)
for x in mine():
    loss = ddp(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    "a parameter outside of the wrapped module": Wrong(
        "not in the mean",
        """
ddp = DDP(make_model())
temperature = nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([*ddp.parameters(), temperature], lr=0.1)
for x in mine():
    optimizer.zero_grad()
    (ddp(x) * temperature).square().mean().backward()
    optimizer.step()
""",
    ),
    "a checkpoint on rank 0 after wrapping": Wrong(
        "weights changed after wrapping",
        """
ddp = DDP(make_model())
if rank == 0:
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.mul_(2)
optimizer = sgd(ddp)
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "drawn anew on each rank after wrapping": Wrong(
        "weights changed after wrapping",
        """
ddp = DDP(make_model())
torch.manual_seed(rank)
nn.init.normal_(ddp.module[0].weight)
optimizer = sgd(ddp)
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "one rank clamps its weights": Wrong(
        "weights differ",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    step(ddp, optimizer, x)
    if rank == 0:
        with torch.no_grad():
            ddp.module[0].weight.clamp_(-0.3, 0.3)
""",
    ),
    "only rank 0 steps": Wrong(
        "steps left out",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    if rank == 0:
        optimizer.step()
""",
    ),
    "one rank steps more rarely": Wrong(
        "steps left out",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine()):
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    if rank == 0 or number != 2:
        optimizer.step()
""",
    ),
    "other weights, means by hand": Wrong(
        "other weights from the start",
        """
torch.manual_seed(rank)
model = make_model()
optimizer = sgd(model)
for x in mine():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    optimizer.step()
""",
    ),
    "optimizer state loaded on rank 0": Wrong(
        "optimizer state differs",
        """
ddp = DDP(make_model())
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
for parameter in ddp.parameters():
    parameter.grad = torch.ones_like(parameter)
state = torch.optim.Adam(ddp.parameters(), lr=0.0)
state.step()
if rank == 0:
    optimizer.load_state_dict(state.state_dict())
    optimizer.param_groups[0]["lr"] = 0.1
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "optimizer state and its rate loaded on rank 0": Wrong(
        "optimizer state differs",
        """
ddp = DDP(make_model())
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
for parameter in ddp.parameters():
    parameter.grad = torch.ones_like(parameter)
state = torch.optim.Adam(ddp.parameters(), lr=0.0)
state.step()
if rank == 0:
    optimizer.load_state_dict(state.state_dict())
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "optimizer state from a file of each rank": Wrong(
        "optimizer state differs",
        """
ddp = DDP(make_model())
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
for parameter in ddp.parameters():
    optimizer.state[parameter] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.full_like(parameter, rank),
        "exp_avg_sq": torch.ones_like(parameter),
    }
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "another learning rate on each rank": Wrong(
        "settings differ",
        """
ddp = DDP(make_model())
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1 * (rank + 1))
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "a plateau of its own on each rank": Wrong(
        "settings differ",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for number, x in enumerate(mine()):
    step(ddp, optimizer, x)
    scheduler.step(float(number) if rank == 0 else -float(number))
""",
    ),
    "the head is left out of the optimizer": Wrong(
        "left out of the optimizer",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh())


model = Net()
ddp = DDP(model)
optimizer = sgd(model.body)
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "a layer added after the optimizer": Wrong(
        "left out of the optimizer",
        """
model = make_model()
optimizer = sgd(model)
model.append(nn.Linear(1, 1))
ddp = DDP(model)
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "rank 0 stays in eval() after it has evaluated": Wrong(
        "modes differ",
        """
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
ddp = DDP(model)
torch.manual_seed(rank)
optimizer = sgd(ddp)
for epoch in range(2):
    for x in mine():
        step(ddp, optimizer, x)
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(x)
    dist.barrier()
""",
    ),
    "buffers that nobody sends": Wrong(
        "buffers differ",
        """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
ddp = DDP(model, broadcast_buffers=False)
optimizer = sgd(ddp)
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "batch normalisation of other data": Wrong(
        "statistics of one rank",
        """
ddp = DDP(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
optimizer = sgd(ddp)
for x in mine(14):
    step(ddp, optimizer, x + 4 * rank)
""",
    ),
    "one channel of another level on each rank": Wrong(
        "statistics of one rank",
        """
ddp = DDP(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
optimizer = sgd(ddp)
level = torch.tensor([0.0, 0.0, 0.0, 6.0]) * rank
for x in mine(14):
    step(ddp, optimizer, x + level)
""",
    ),
    "another learning rate, and a checkpoint in between": Wrong(
        "settings differ",
        """
ddp = DDP(make_model())
begin = {name: value.clone() for name, value in ddp.state_dict().items()}
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1 * (rank + 1))
for number, x in enumerate(mine(8)):
    if number == 4:
        dist.barrier()
        ddp.load_state_dict(begin)
    step(ddp, optimizer, x)
""",
    ),
    # Gradients.
    "a step inside no_sync": Wrong(
        "step inside no_sync",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    with ddp.no_sync():
        step(ddp, optimizer, x)
""",
    ),
    "the second of two models inside no_sync": Wrong(
        "step inside no_sync",
        """
encoder, head = DDP(nn.Linear(4, 4)), DDP(nn.Linear(4, 1))
of_encoder, of_head = sgd(encoder), sgd(head)
for x in mine():
    with head.no_sync():
        loss = head(encoder(x)).square().mean()
    loss.backward()
    for optimizer in of_encoder, of_head:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "the modulo is off by one": Wrong(
        "step inside no_sync",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine(8)):
    with ddp.no_sync() if number % 2 else contextlib.nullcontext():
        (ddp(x).square().mean() / 2).backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a step after each micro-batch": Wrong(
        "step inside no_sync",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine(8)):
    with contextlib.nullcontext() if number % 4 == 3 else ddp.no_sync():
        (ddp(x).square().mean() / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "the last batches of an epoch stay inside no_sync": Wrong(
        "step inside no_sync",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
batches = mine(7)
for number, x in enumerate(batches):
    is_last = number % 3 == 2
    with contextlib.nullcontext() if is_last else ddp.no_sync():
        (ddp(x).square().mean() / 3).backward()
    if is_last or number == len(batches) - 1:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "retain_graph": Wrong(
        "a backward alone",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    optimizer.zero_grad()
    output = ddp(x)
    output.mean().backward(retain_graph=True)
    output.square().mean().backward()
    optimizer.step()
""",
    ),
    "two forward passes, then two backward": Wrong(
        "a backward alone",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    optimizer.zero_grad()
    first = ddp(x).square().mean()
    second = ddp(-x).square().mean()
    first.backward()
    second.backward()
    optimizer.step()
""",
    ),
    "an optimizer inside backward": Wrong(
        "step inside backward",
        """
ddp = DDP(nn.Linear(4, 1, bias=False))
weight = ddp.module.weight
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.register_post_accumulate_grad_hook(
    lambda parameter: (optimizer.step(), optimizer.zero_grad())
)
for x in mine():
    ddp(x).sum().backward()
""",
    ),
    "noise of its own in the gradients": Wrong(
        "gradients differ",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
torch.manual_seed(rank)
for x in mine():
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    for parameter in ddp.parameters():
        parameter.grad += 0.01 * torch.randn_like(parameter)
    optimizer.step()
""",
    ),
    "by hand, but for the biases": Wrong(
        "averaged in part",
        """
model = make_model()
optimizer = sgd(model)
for x in mine():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
    optimizer.step()
""",
    ),
    "by hand, before the last backward": Wrong(
        "averaged in part",
        """
model = make_model()
optimizer = sgd(model)
for x in mine():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    model(-x).square().mean().backward()
    optimizer.step()
""",
    ),
    "zeroed between backward and step": Wrong(
        "steps without gradients",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    ddp(x).square().mean().backward()
    optimizer.zero_grad()
    optimizer.step()
""",
    ),
    "the optimizer holds what was copied": Wrong(
        "steps without gradients",
        """
import copy

model = make_model()
optimizer = sgd(model)
ddp = DDP(copy.deepcopy(model))
for x in mine():
    ddp.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
""",
    ),
    "the optimizer is made before fully_shard": Wrong(
        "steps without gradients",
        """
from torch.distributed.fsdp import fully_shard

model = make_model()
optimizer = sgd(model)
fully_shard(model)
for x in mine():
    step(model, optimizer, x)
""",
    ),
    "the generator is called past its wrapper, its outputs used twice": Wrong(
        "around the wrapper",
        """
generator, critic = DDP(nn.Linear(3, 4)), DDP(make_model())
of_generator, of_critic = sgd(generator), sgd(critic)
for x in mine():
    made = generator.module(x[:, :3])
    of_critic.zero_grad()
    (critic(x).mean() - critic(made.detach()).mean()).backward()
    of_critic.step()
    of_generator.zero_grad()
    critic(made).mean().backward()
    of_generator.step()
""",
    ),
    "a regulariser after the mean": Wrong(
        "a backward alone",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    (x.mean() * ddp.module[0].weight.square().sum()).backward()
    optimizer.step()
""",
    ),
    "sync_gradients is forgotten": Wrong(
        "no sync_gradients",
        """
from miniddp import SimpleDDP

ddp = SimpleDDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "clipped before sync_gradients": Wrong(
        "clipped before the mean",
        """
from miniddp import SimpleDDP

ddp = SimpleDDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    optimizer.zero_grad()
    (10 * (1 + rank) * ddp(x).square().mean()).backward()
    clip_grad_norm_(ddp.parameters(), 1.0)
    ddp.sync_gradients()
    optimizer.step()
""",
    ),
    "clipped before the mean by hand": Wrong(
        "clipped before the mean",
        """
model = make_model()
optimizer = sgd(model)
for x in mine():
    optimizer.zero_grad()
    (10 * model(x).square().mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    optimizer.step()
""",
    ),
    "each micro-batch is clipped": Wrong(
        "clipped before the mean",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine(8)):
    is_last = number % 2 == 1
    with contextlib.nullcontext() if is_last else ddp.no_sync():
        (10 * ddp(x).square().mean() / 2).backward()
    clip_grad_norm_(ddp.parameters(), 0.5)
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "clipped while scaled": Wrong(
        "clipped while scaled",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for x in mine():
    optimizer.zero_grad()
    scaler.scale(ddp(x).square().mean()).backward()
    clip_grad_norm_(ddp.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "unscaled after clipping": Wrong(
        "clipped while scaled",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for x in mine():
    optimizer.zero_grad()
    scaler.scale(ddp(x).square().mean()).backward()
    clip_grad_norm_(ddp.parameters(), 1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "averaged twice": Wrong(
        "averaged twice",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    optimizer.step()
""",
    ),
    "summed after the mean": Wrong(
        "averaged twice",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
""",
    ),
    "summed, not averaged": Wrong(
        "summed, not averaged",
        """
model = make_model()
optimizer = sgd(model)
for x in mine():
    optimizer.zero_grad()
    F.mse_loss(model(x), x[:, :1]).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
""",
    ),
    "summed in one buffer, and clipped": Wrong(
        "summed, not averaged",
        """
model = make_model()
optimizer = sgd(model)
for x in mine():
    optimizer.zero_grad()
    (model(x).square().mean() + 0.01 * model(x).abs().mean()).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
""",
    ),
    "the loss is not divided": Wrong(
        "loss not divided",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine(8)):
    is_last = number % 4 == 3
    with contextlib.nullcontext() if is_last else ddp.no_sync():
        ddp(x).square().mean().backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "the loss is not divided, and scaled": Wrong(
        "loss not divided",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for number, x in enumerate(mine(8)):
    is_last = number % 2 == 1
    with contextlib.nullcontext() if is_last else ddp.no_sync():
        scaler.scale(ddp(x).square().mean()).backward()
    if is_last:
        scaler.unscale_(optimizer)
        clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    "the loss is divided by one": Wrong(
        "loss not divided",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
steps_that_the_library_knows = 1
for number, x in enumerate(mine(8)):
    is_last = number % 4 == 3
    with contextlib.nullcontext() if is_last else ddp.no_sync():
        (ddp(x).square().mean() / steps_that_the_library_knows).backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "every micro-batch is averaged": Wrong(
        "averaged in every micro-batch",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine(8)):
    (ddp(x).square().mean() / 4).backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "no_sync around backward only": Wrong(
        "averaged in every micro-batch",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine(8)):
    is_last = number % 4 == 3
    loss = ddp(x).square().mean() / 4
    with contextlib.nullcontext() if is_last else ddp.no_sync():
        loss.backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "no_sync around one of two calls of backward": Wrong(
        "averaged in every micro-batch",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine(8)):
    loss = ddp(x).square().mean() / 2
    if number % 2 == 1:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        with ddp.no_sync():
            loss.backward()
""",
    ),
    "one NaN": Wrong(
        "not finite",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine()):
    if number == 2 and rank == 1:
        x[0, 0] = float("nan")
    step(ddp, optimizer, x)
""",
    ),
    "one rank leaves out the step of its NaN": Wrong(
        "not finite",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine()):
    if number == 2 and rank == 1:
        x[0, 0] = float("nan")
    loss = ddp(x).square().mean()
    is_finite = loss.isfinite()
    optimizer.zero_grad()
    loss.backward()
    if is_finite:
        optimizer.step()
""",
    ),
    # Data.
    "no sampler, one seed": Wrong(
        "same samples",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x, y in DataLoader(dataset, batch_size=4, shuffle=True):
    step(ddp, optimizer, x)
""",
    ),
    "no sampler, no shuffle": Wrong(
        "same samples",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x, y in DataLoader(dataset, batch_size=4):
    step(ddp, optimizer, x)
""",
    ),
    "no sampler, a seed for each rank": Wrong(
        "overlapping shares",
        """
torch.manual_seed(rank)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x, y in DataLoader(dataset, batch_size=4, shuffle=True):
    step(ddp, optimizer, x)
""",
    ),
    "no sampler, augmented, with labels": Wrong(
        "overlapping shares",
        """
labels = torch.randint(10, (40,)).tolist()


class Noisy(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.randn(4) + index, labels[index]


torch.manual_seed(rank)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x, label in DataLoader(Noisy(), batch_size=4, shuffle=True):
    step(ddp, optimizer, x)
""",
    ),
    "blocks that overlap": Wrong(
        "overlapping shares",
        """
torch.manual_seed(rank)
begin = 12 * rank
shard = TensorDataset(dataset.tensors[0][begin : begin + 24])
ddp = DDP(make_model())
optimizer = sgd(ddp)
for (x,) in DataLoader(shard, batch_size=4, shuffle=True):
    step(ddp, optimizer, x)
""",
    ),
    "a sampler of batches with a seed for each rank": Wrong(
        "overlapping shares",
        """
torch.manual_seed(rank)
batches = torch.randperm(48).view(12, 4)[rank::world_size]
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x, y in DataLoader(dataset, batch_sampler=batches.tolist()):
    step(ddp, optimizer, x)
""",
    ),
    "a stream that each rank reads as a whole, in an order of its own": Wrong(
        "overlapping shares",
        """
class Stream(IterableDataset):
    def __iter__(self):
        order = torch.randperm(48, generator=torch.Generator().manual_seed(rank))
        return iter(dataset.tensors[0][order])


ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in DataLoader(Stream(), batch_size=4):
    step(ddp, optimizer, x)
""",
    ),
    "random batches of one seed, without a loader": Wrong(
        "same samples",
        """
tokens = torch.randn(200)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for _ in range(6):
    begin = torch.randint(196, (4,))
    step(ddp, optimizer, torch.stack([tokens[i : i + 4] for i in begin]))
""",
    ),
    "a stream that is not split": Wrong(
        "same samples",
        """
class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset.tensors[0])


ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in DataLoader(Stream(), batch_size=4):
    step(ddp, optimizer, x)
""",
    ),
    "one seed for a generator's noise": Wrong(
        "same random numbers",
        """
generator, critic = DDP(nn.Linear(3, 4)), DDP(make_model())
of_generator, of_critic = sgd(generator), sgd(critic)
for x in mine():
    noise = torch.randn(4, 3)
    of_critic.zero_grad()
    (critic(x).mean() - critic(generator(noise).detach()).mean()).backward()
    of_critic.step()
    of_generator.zero_grad()
    critic(generator(torch.randn(4, 3))).mean().backward()
    of_generator.step()
""",
    ),
    "batches in dicts, the same on all ranks": Wrong(
        "same samples",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, batch):
        return {"loss": F.mse_loss(self.layer(batch["x"]), batch["more"]["y"])}


ddp = DDP(Net())
optimizer = sgd(ddp)
for begin in range(0, 24, 4):
    x, y = dataset[begin : begin + 4]
    optimizer.zero_grad()
    ddp({"x": x, "more": {"y": y}})["loss"].backward()
    optimizer.step()
""",
    ),
    "the same tokens on all ranks, means by hand": Wrong(
        "same samples",
        """
model = make_model()
optimizer = sgd(model)
for begin in range(0, 24, 4):
    optimizer.zero_grad()
    model(dataset[begin : begin + 4][0]).square().mean().backward()
    for work in [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]:
        work.wait()
    for parameter in model.parameters():
        parameter.grad /= world_size
    optimizer.step()
""",
    ),
    "the same tokens on all ranks, means in one buffer": Wrong(
        "same samples",
        """
model = make_model()
optimizer = sgd(model)
for begin in range(0, 24, 4):
    optimizer.zero_grad()
    model(dataset[begin : begin + 4][0]).square().mean().backward()
    flat = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world_size
    nn.utils.vector_to_parameters(flat, [p.grad for p in model.parameters()])
    optimizer.step()
""",
    ),
    "the same inputs on all ranks, other dropout masks": Wrong(
        "same samples",
        """
ddp = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
optimizer = sgd(ddp)
torch.manual_seed(rank)
for begin in range(0, 24, 4):
    step(ddp, optimizer, dataset[begin : begin + 4][0])
""",
    ),
    "a list of samples that is not split, augmented": Wrong(
        "same samples",
        """
class Images(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"image": torch.randn(4) + index, "file_name": f"{index}.png"}


ddp = DDP(make_model())
torch.manual_seed(rank)
optimizer = sgd(ddp)
for samples in DataLoader(Images(), batch_size=4, collate_fn=list, num_workers=1):
    step(ddp, optimizer, torch.stack([sample["image"] for sample in samples]))
""",
    ),
    "split with another seed on each rank": Wrong(
        "datasets differ",
        """
generator = torch.Generator().manual_seed(rank)
kept, _ = torch.utils.data.random_split(dataset, [40, 8], generator)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x, y in DataLoader(kept, batch_size=4, sampler=DistributedSampler(kept)):
    step(ddp, optimizer, x)
""",
    ),
    "shuffled before the sampler, with another seed on each rank": Wrong(
        "datasets differ",
        """
import random

samples = [(x, number) for number, x in enumerate(dataset.tensors[0])]
random.Random(rank).shuffle(samples)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x, number in DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples)):
    step(ddp, optimizer, x)
""",
    ),
    "files as the file system lists them": Wrong(
        "datasets differ",
        """
class Files(Dataset):
    def __init__(self):
        self.names = [f"{number}.txt" for number in range(40)][:: 1 - 2 * rank]

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), float(self.names[index].removesuffix(".txt")))


files = Files()
ddp = DDP(make_model())
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
for x in DataLoader(files, batch_size=4, sampler=DistributedSampler(files)):
    step(ddp, optimizer, x)
""",
    ),
    "a vocabulary made of a set": Wrong(
        "datasets differ",
        """
class Texts(Dataset):
    def __init__(self):
        words = ["a", "book", "of", "words"]
        words = words[rank:] + words[:rank]  # as a set of strings gives them
        self.number = {word: number for number, word in enumerate(words)}

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return F.one_hot(torch.tensor(self.number["book"]), 4) * float(index)


texts = Texts()
ddp = DDP(make_model())
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
for x in DataLoader(texts, batch_size=4, sampler=DistributedSampler(texts)):
    step(ddp, optimizer, x)
""",
    ),
    "workers that each read the whole stream": Wrong(
        "each worker reads everything",
        """
class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset.tensors[0][rank::world_size])


ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in DataLoader(Stream(), batch_size=4, num_workers=2):
    step(ddp, optimizer, x)
""",
    ),
    "all samplers are of rank 0": Wrong(
        "samplers that do not split",
        """
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=0)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
    step(ddp, optimizer, x)
""",
    ),
    "a sampler for four ranks": Wrong(
        "samplers that do not split",
        """
sampler = DistributedSampler(dataset, num_replicas=4, rank=rank)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
    step(ddp, optimizer, x)
""",
    ),
    "a sampler for one rank": Wrong(
        "samplers that do not split",
        """
sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=rank)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
    step(ddp, optimizer, x)
""",
    ),
    "samplers with the rank as their seed": Wrong(
        "samplers that do not split",
        """
sampler = DistributedSampler(dataset, seed=rank)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
    step(ddp, optimizer, x)
""",
    ),
    "set_epoch with the rank": Wrong(
        "samplers that do not split",
        """
sampler = DistributedSampler(dataset)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for epoch in range(2):
    sampler.set_epoch(epoch + rank)
    for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
        step(ddp, optimizer, x)
""",
    ),
    "set_epoch is forgotten": Wrong(
        "same order in each epoch",
        """
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for epoch in range(2):
    for x, y in loader:
        step(ddp, optimizer, x)
""",
    ),
    "set_epoch is called once": Wrong(
        "same order in each epoch",
        """
sampler = DistributedSampler(dataset)
sampler.set_epoch(1)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for epoch in range(3):
    for x, y in DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1):
        step(ddp, optimizer, x)
""",
    ),
    "the seed is set anew in each epoch": Wrong(
        "same order in each epoch",
        """
shard = TensorDataset(*dataset[rank::world_size])
loader = DataLoader(shard, batch_size=4, shuffle=True)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for epoch in range(2):
    torch.manual_seed(rank)
    for x, y in loader:
        step(ddp, optimizer, x)
""",
    ),
    "one rank has a batch more": Wrong(
        "unequal batches",
        """
shard = TensorDataset(dataset.tensors[0][: 24 - 8 * rank])
ddp = DDP(make_model())
optimizer = sgd(ddp)
for (x,) in DataLoader(shard, batch_size=4, shuffle=True):
    step(ddp, optimizer, x + rank)
dist.barrier()
""",
    ),
    "streams of unequal length": Wrong(
        "unequal batches",
        """
class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset.tensors[0][rank * 20 :])


ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in DataLoader(Stream(), batch_size=4):
    step(ddp, optimizer, x)
dist.barrier()
""",
    ),
    "streams of unequal length, twice": Wrong(
        "unequal batches",
        """
class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset.tensors[0][: 24 - 4 * rank])


ddp = DDP(make_model())
optimizer = sgd(ddp)
for _ in range(2):
    for x in DataLoader(Stream(), batch_size=4):
        step(ddp, optimizer, x + rank)
""",
    ),
    "evaluation with padding": Wrong(
        "evaluated twice",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine(3):
    step(ddp, optimizer, x)
odd = TensorDataset(torch.arange(180.0).reshape(45, 4))
loader = DataLoader(odd, batch_size=4, sampler=DistributedSampler(odd, shuffle=False))
total = torch.zeros(1)
with torch.no_grad():
    for (x,) in loader:
        total += ddp.module(x).sum()
dist.all_reduce(total)
""",
    ),
    "all evaluate all, and add up": Wrong(
        "evaluated twice",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine(3):
    step(ddp, optimizer, x)
right = torch.zeros(1, dtype=torch.long)
with torch.no_grad():
    for x, y in DataLoader(dataset, batch_size=8):
        right += (ddp.module(x) > y).sum()
dist.all_reduce(right)
""",
    ),
    "workers that draw alike": Wrong(
        "augmented alike",
        """
class Noisy(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.randn(4) + index


data = Noisy()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
ddp = DDP(make_model())
optimizer = sgd(ddp)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x in loader:
        step(ddp, optimizer, x)
""",
    ),
    "workers that are seeded without the rank": Wrong(
        "augmented alike",
        """
import numpy as np


class Noisy(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.rand(4) * index / 48 + np.random.rand()


def seed_worker(number):
    np.random.seed(1234 + number)


noisy = Noisy()
sampler = DistributedSampler(noisy)
ddp = DDP(make_model())
torch.manual_seed(rank)
optimizer = sgd(ddp)
loader = DataLoader(noisy, 4, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)
for x in loader:
    step(ddp, optimizer, x.float())
""",
    ),
    "one seed for numpy, without workers": Wrong(
        "augmented alike",
        """
import numpy as np


class Noisy(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.ones(4) * index / 24 + np.random.rand()


np.random.seed(0)
noisy = Noisy()
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in DataLoader(noisy, batch_size=4, sampler=DistributedSampler(noisy)):
    step(ddp, optimizer, x.float())
""",
    ),
    # Random numbers.
    "one seed for dropout": Wrong(
        "same random numbers",
        """
ddp = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
optimizer = sgd(ddp)
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "one seed for noise": Wrong(
        "same random numbers",
        """
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x + torch.randn_like(x))


ddp = DDP(Noisy())
optimizer = sgd(ddp)
for x in mine():
    step(ddp, optimizer, x)
""",
    ),
    "one seed for timesteps": Wrong(
        "same random numbers",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.time = nn.Embedding(50, 4)

    def forward(self, x, t):
        return self.layer(x + self.time(t))


ddp = DDP(Net())
optimizer = sgd(ddp)
for x in mine():
    t = torch.randint(50, (4,))
    noise = torch.randn_like(x)
    optimizer.zero_grad()
    (ddp(x + t[:, None] / 50 * noise, t) - noise).square().mean().backward()
    optimizer.step()
""",
    ),
    # Order.
    "a broadcast meets an all-reduce": Wrong(
        "other calls",
        """
x = torch.ones(3)
if rank == 0:
    dist.broadcast(x, 0)
else:
    dist.all_reduce(x)
dist.barrier()
""",
    ),
    "all-reduces of other shapes": Wrong(
        "other calls",
        """
dist.all_reduce(torch.ones(3 + rank))
""",
    ),
    "each rank broadcasts from itself": Wrong(
        "other calls",
        """
stop = torch.zeros(1)
dist.broadcast(stop, src=rank)
dist.barrier()
""",
    ),
    "a layer that one rank leaves out": Wrong(
        "unused parameters",
        """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x, is_whole):
        return self.other(self.layer(x)) if is_whole else self.layer(x)


ddp = DDP(Gate())
optimizer = sgd(ddp)
for number, x in enumerate(mine(4)):
    optimizer.zero_grad()
    ddp(x, is_whole=number != 1 or rank == 0).square().mean().backward()
    optimizer.step()
""",
    ),
    "a collective under if rank == 0": Wrong(
        "a hang",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine(3):
    loss = step(ddp, optimizer, x)
    if rank == 0:
        dist.all_reduce(loss.detach())
""",
    ),
    "both receive before they send": Wrong(
        "a hang",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine(3):
    step(ddp, optimizer, x)
halo = torch.zeros(4)
dist.recv(halo, src=1 - rank)
dist.send(x[0], dst=1 - rank)
""",
    ),
    "one rank leaves out what is NaN": Wrong(
        "a rank has left",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
for number, (x, y) in enumerate(loader):
    loss = (ddp(x) - y).square().mean()
    if number in (1, 2) and rank == 1:
        loss = loss * float("nan")
    if loss.isnan():
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    "evaluation on rank 0 with an all-reduce out of sight": Wrong(
        "other calls",
        """
def evaluate(model, x):
    with torch.no_grad():
        loss = model(x).square().mean()
    dist.all_reduce(loss)
    return loss


ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine(3):
    step(ddp, optimizer, x)
if rank == 0:
    evaluate(ddp.module, x)
dist.barrier()
""",
    ),
    "buffers are sent by rank 0's evaluation": Wrong(
        "other calls",
        """
ddp = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
optimizer = sgd(ddp)
for x in mine(4):
    step(ddp, optimizer, x)
if rank == 0:
    ddp.eval()
    with torch.no_grad():
        ddp(x)
dist.barrier()
""",
    ),
    "each rank stops by itself": Wrong(
        "other calls",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine(6)):
    step(ddp, optimizer, x)
    if number == 2 and rank == 0:
        break
dist.barrier()
""",
    ),
    "a rank has left": Wrong(
        "a rank has left",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine(6)):
    step(ddp, optimizer, x)
    if number == 2 and rank == 0:
        break
""",
    ),
    "a barrier too few": Wrong(
        "a rank has left",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine(3):
    step(ddp, optimizer, x)
if rank == 0:
    dist.barrier()
""",
    ),
    "an error that one rank swallows": Wrong(
        "other calls",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine(4)):
    try:
        if number == 1 and rank == 1:
            raise ValueError("a bad sample")
        step(ddp, optimizer, x)
    except ValueError:
        continue
dist.barrier()
""",
    ),
    # Keeping, and speed.
    "every rank saves": Wrong(
        "every rank saves",
        """
import tempfile

ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine(3):
    step(ddp, optimizer, x)
torch.save(ddp.module.state_dict(), tempfile.gettempdir() + "/miniddp_check_model.pt")
""",
    ),
    "every rank writes its state": Wrong(
        "every rank saves",
        """
import json
import tempfile

ddp = DDP(make_model())
optimizer = sgd(ddp)
for number, x in enumerate(mine(3)):
    step(ddp, optimizer, x)
    with open(tempfile.gettempdir() + "/miniddp_check_state.json", "w") as file:
        json.dump({"step": number}, file)
""",
    ),
    "onto the GPU of the rank that saved": Wrong(
        "no map_location",
        """
import tempfile

with tempfile.NamedTemporaryFile() as file:
    torch.save({"model": dataset.tensors[0]}, file)
    file.seek(0)
    torch.Tensor.get_device = lambda tensor: 0  # there is none: stand-ins
    torch.cuda.current_device = lambda: rank
    torch.load(file)
dist.barrier()
""",
    ),
    "one rank is late": Wrong(
        "a rank is late",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine(14):
    time.sleep(0.2 * rank)
    step(ddp, optimizer, x)
""",
    ),
    "find_unused_parameters without need": Wrong(
        "needless find_unused_parameters",
        """
ddp = DDP(make_model(), find_unused_parameters=True)
optimizer = sgd(ddp)
for x in mine(10):
    step(ddp, optimizer, x)
""",
    ),
    "undivided, clipped, and weight decay for matrices alone": Wrong(
        "loss not divided",
        """
ddp = DDP(make_model())
matrices = [p for p in ddp.parameters() if p.dim() > 1]
vectors = [p for p in ddp.parameters() if p.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
optimizer = torch.optim.AdamW(groups)
batches = iter(mine(24))
for _ in range(6):
    optimizer.zero_grad()
    for micro in range(4):
        ddp.require_backward_grad_sync = micro == 3
        ddp(next(batches)).square().mean().backward()
    clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
""",
    ),
    "buffers that nobody sends, beside a wrapper with a constant one": Wrong(
        "buffers differ",
        """
generator = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), broadcast_buffers=False)
critic = nn.Linear(4, 1)
critic.register_buffer("filter", torch.ones(3))
critic = DDP(critic, broadcast_buffers=False)
optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], lr=0.01)
for x in mine():
    optimizer.zero_grad()
    F.softplus(critic(generator(x))).mean().backward()
    optimizer.step()
""",
    ),
    "noise of a generator drawn alike": Wrong(
        "same random numbers",
        """
generator = DDP(nn.Linear(4, 4))
critic = DDP(nn.Linear(4, 1))
optimizers = [sgd(critic), sgd(generator)]
for x, _ in DataLoader(dataset, 4, sampler=DistributedSampler(dataset)):
    noise = torch.randn(4, 4)
    optimizers[0].zero_grad()
    fake = F.softplus(critic(generator(noise).detach())).mean()
    (F.softplus(-critic(x)).mean() + fake).backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    F.softplus(-critic(generator(noise))).mean().backward()
    optimizers[1].step()
""",
    ),
    "averaged in one flat tensor, then divided by a rank's own number of tokens": Wrong(
        "gradients differ",
        """
model = make_model()
optimizer = sgd(model)
for x in mine():
    optimizer.zero_grad()
    model(x).square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(flat)
    tokens = int((x > 0).sum())
    nn.utils.vector_to_parameters(flat / tokens, gradients)
    optimizer.step()
""",
    ),
    "one rank drops a gradient after the mean": Wrong(
        "gradients differ",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for x in mine():
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    if rank == 0:
        ddp.module[0].bias.grad = None
    optimizer.step()
""",
    ),
    "one seed for timesteps, and an evaluation that gathers": Wrong(
        "same random numbers",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.time = nn.Embedding(50, 4)

    def forward(self, x, t):
        return self.layer(x + self.time(t))


ddp = DDP(Net())
optimizer = sgd(ddp)
for number, x in enumerate(mine()):
    t = torch.randint(50, (4,))
    optimizer.zero_grad()
    loss = (ddp(x, t) - x).square().mean()
    loss.backward()
    optimizer.step()
    if number % 5 == 0:
        dist.all_gather([torch.empty(()) for _ in range(world_size)], loss.detach())
""",
    ),
    "a head of each rank's own outside of the wrapper": Wrong(
        "other weights from the start",
        """
ddp = DDP(nn.Linear(4, 8))
torch.manual_seed(rank)
head = nn.Linear(8, 1)
optimizer = torch.optim.SGD([*ddp.parameters(), *head.parameters()], lr=0.1)
for x in mine():
    optimizer.zero_grad()
    head(ddp(x)).square().mean().backward()
    optimizer.step()
""",
    ),
    "no sampler, a seed for each rank, batches of a class of their own": Wrong(
        "overlapping shares",
        """
class Batch:
    def __init__(self, samples):
        self.x, self.y = map(torch.stack, zip(*samples, strict=True))


ddp = DDP(make_model())
optimizer = sgd(ddp)
torch.manual_seed(rank)
for batch in DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=Batch):
    step(ddp, optimizer, batch.x)
""",
    ),
    "the loss is not divided, with a call of backward for each micro-batch": Wrong(
        "loss not divided",
        """
ddp = DDP(make_model())
optimizer = sgd(ddp)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
for number, (x, y) in enumerate(loader):
    if number % 2 == 0:
        optimizer.zero_grad()
        with ddp.no_sync():
            (ddp(x) - y).square().mean().backward()
    else:
        (ddp(x) - y).square().mean().backward()
        optimizer.step()
""",
    ),
    "the second of two stages is not wrapped": Wrong(
        "not in the mean",
        """
def train(model):
    optimizer = sgd(model)
    for x in mine():
        step(model, optimizer, x)


train(DDP(make_model()))
train(make_model())
""",
    ),
}
