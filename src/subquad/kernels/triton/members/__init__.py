"""Members of a cluster, which share its listed keys and, in clustered-tail, its cells: attention and its gradient.

For query i of cluster c, with its list T and its cells x as (k̄, v̄, λ):

    s_ij = scale·q_i·k_j,   t_ix = scale·(q_i − q̄_c)·k̄_x + λ_x,   p = softmax over both

    tail        out_i = Σ_j p_ij v_j + Σ_x p_ix v̄_x                lse_i = ln Σ e^{s_ij} + …
    improved    out_i = m_c Σ_j p_ij v_j + rest_c                   lse_i = ln Σ e^{s_ij} − ln m_c

With g = ∂L/∂out, h = ∂L/∂lse and ρ_i = g_i·Σ p v the gradients of the logits are p_ij (m_c (g_i·v_j − ρ_i) + h_i); in
a tail m is 1.

A program takes a block of queries of one cluster, or one cluster's keys and then all its queries in their order.
"""
