"""PPO on CartPole by rejax 0.1.3, which needs gymnax below 1. Its evaluations are left out."""

import jax
from protocol import serve_compiled, specification
from rejax import PPO
from rejax.evaluate import evaluate


def main():
    spec = specification()
    algorithm = PPO.create(
        env="CartPole-v1",
        num_envs=spec["num_envs"],
        num_steps=spec["num_steps"],
        num_epochs=4,
        num_minibatches=4,
        gamma=0.99,
        gae_lambda=0.95,
        learning_rate=3e-4,
        clip_eps=0.2,
        vf_coef=0.5,
        ent_coef=0.01,
        max_grad_norm=0.5,
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
    )

    def train(key, num_updates=spec["num_updates"]):
        def update(state, _):
            return algorithm.train_iteration(state), None

        state, _ = jax.lax.scan(update, algorithm.init_state(key), None, num_updates)
        # the state's class is made anew by each call of init_state: only its parts can leave
        return state.actor_ts.params, state.critic_ts.params

    key = jax.random.PRNGKey(spec.get("seed", 0))
    if spec["num_seeds"] > 1:
        fn, args = jax.vmap(train), (jax.random.split(key, spec["num_seeds"]),)
    else:
        fn, args = train, (key,)

    def learn():
        steps = spec["num_envs"] * spec["num_steps"]
        env, env_params = algorithm.env, algorithm.env_params

        def one(key):
            train_key, test_key = jax.random.split(key)
            actor, _ = train(train_key, spec["learning_steps"] // steps)

            def act(obs, _):
                logits = algorithm.actor.apply(actor, obs[None], method="_action_dist").logits
                return logits.argmax(-1)[0]

            _, returns = evaluate(act, test_key, env, env_params, 32, 500)
            return returns.mean()

        return jax.jit(jax.vmap(one))(jax.random.split(key, spec["learning_seeds"])).tolist()

    serve_compiled(fn, args, learn)


if __name__ == "__main__":
    main()
