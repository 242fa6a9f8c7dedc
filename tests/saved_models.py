"""Random models that transformers has saved."""

import torch


def save(model, folder, shard: str):
    """Draw the weights and save the model in shards: norms are not 1 and biases not 0, so that one left out is seen, and
    weights are large enough that attention is far from even. Returns it."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[1] ** 0.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard)
    return model
