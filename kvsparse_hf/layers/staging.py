"""What a `PagedStore` does where the device cannot read host memory in place: ordinary copies, which no graph can hold."""

import torch
from torch import Tensor


@torch.compiler.disable
def write_full_pages(store) -> None:
    """Before an append: brings pages that are full to the host."""
    full = (store.length > 0) & (store.length % store.page_size == 0) & (store.length < store.max_capacity)
    if bool(full.any()):
        store.flush()


@torch.compiler.disable
def fetch(store, miss_page: Tensor, miss_slot: Tensor, miss_count: Tensor) -> None:
    """As `ops.hot_fetch`."""
    number = torch.arange(miss_page.shape[-1], device=miss_page.device)
    row, head, entry = (number < miss_count.unsqueeze(-1)).nonzero(as_tuple=True)
    page, slot = miss_page[row, head, entry].long().cpu(), miss_slot[row, head, entry].long()
    store.hot[row, head, slot] = store.host[row.cpu(), head.cpu(), page].to(store.hot.device)
