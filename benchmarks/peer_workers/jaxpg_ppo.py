"""PPO on CartPole by jaxpg."""

import jax
from protocol import serve_compiled, specification

import jaxpg


def main():
    spec = specification()
    env = jaxpg.from_gymnax("CartPole-v1")
    dtype = spec.get("compute_dtype")
    policy = jaxpg.mlp_policy(env, hidden_sizes=(64, 64), activation="tanh", compute_dtype=dtype)
    algorithm = jaxpg.ppo(env, policy)
    config = jaxpg.PPOConfig(
        num_envs=spec["num_envs"],
        num_steps=spec["num_steps"],
        num_epochs=4,
        num_minibatches=4,
        gamma=0.99,
        gae_lambda=0.95,
        learning_rate=3e-4,
        clip_epsilon=0.2,
        value_clip_epsilon=0.2,
        vf_coef=0.5,
        ent_coef=0.01,
        max_grad_norm=0.5,
    )
    num_seeds, num_updates = spec["num_seeds"], spec["num_updates"]
    mesh = jaxpg.device_mesh() if len(jax.devices()) > 1 else None
    key = jax.random.key(spec.get("seed", 0))

    def train(key):
        return jaxpg.train(algorithm, key, config, num_updates)

    if num_seeds > 1:
        fn = jaxpg.map_in_chunks(train, chunk_size=spec.get("chunk_size") or num_seeds, mesh=mesh)
        keys = jax.random.split(key, num_seeds)
        args = (keys if mesh is None else jaxpg.shard_leading_axis(keys, mesh),)
    else:
        if mesh is not None:
            algorithm = jaxpg.data_parallel(algorithm, mesh)
        fn, args = train, (key,)

    def learn():
        steps = config.num_envs * config.num_steps

        def one(key):
            train_key, test_key = jax.random.split(key)
            state, _ = jaxpg.train(algorithm, train_key, config, spec["learning_steps"] // steps)
            return jaxpg.evaluate(algorithm, state, test_key, num_episodes=32).mean()

        keys = jax.random.split(key, spec["learning_seeds"])
        return jax.jit(jax.vmap(one))(keys).tolist()

    serve_compiled(fn, args, learn)


if __name__ == "__main__":
    main()
