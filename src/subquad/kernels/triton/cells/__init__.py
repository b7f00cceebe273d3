"""Cells of keys as clusters of queries see them, and the gradient through that.

For the mean query q̄ of a cluster, and those keys of a cell that are not `inside` the cluster's own list:

    u_j = scale·q̄·k_j,   λ = ln Σ_j e^{u_j},   w_j = e^{u_j − λ},   k̄ = Σ_j w_j k_j,   v̄ = Σ_j w_j v_j

The gradients of k̄, v̄ and λ come in as three numbers per cell: ∂L/∂u_j = w_j (dk̄·k_j + dv̄·v_j + c). With c = dλ −
dk̄·k̄ − dv̄·v̄ that is the derivative of the equations above.

    order      [ keys of cell 0 │ cell 1 │ … ]        keys lie sorted by cell
    inside     a bit for each cluster and each place in that order, in words of 32
"""
