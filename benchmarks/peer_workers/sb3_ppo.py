"""PPO on CartPole by Stable-Baselines3 (PyTorch), or by sbx (JAX): what people use today."""

import torch
from protocol import serve, specification
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy


def main():
    spec = specification()
    if spec["library"] == "sbx":
        from sbx import PPO

        policy_kwargs = {"net_arch": [64, 64]}
    else:
        from stable_baselines3 import PPO

        policy_kwargs = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}
    torch.set_num_threads(spec["torch_threads"])
    batch = spec["num_envs"] * spec["num_steps"]

    def make(seed):
        return PPO(
            "MlpPolicy",
            make_vec_env("CartPole-v1", spec["num_envs"], seed=seed),
            n_steps=spec["num_steps"],
            batch_size=batch // 4,
            n_epochs=4,
            gamma=0.99,
            gae_lambda=0.95,
            learning_rate=3e-4,
            clip_range=0.2,
            vf_coef=0.5,
            ent_coef=0.01,
            max_grad_norm=0.5,
            policy_kwargs=policy_kwargs,
            seed=seed,
            device="cpu",
        )

    model = make(0)
    steps = batch * spec["num_updates"]
    model.learn(batch)  # warm-up

    def learn():
        returns = []
        for seed in range(spec["learning_seeds"]):
            trained = make(seed).learn(spec["learning_steps"])
            test = make_vec_env("CartPole-v1", 1, seed=1000 + seed)
            returns.append(float(evaluate_policy(trained, test, n_eval_episodes=32)[0]))
        return returns

    serve(lambda: model.learn(steps), learn, trace=0.0, compile=0.0, planned_bytes=None)


if __name__ == "__main__":
    main()
