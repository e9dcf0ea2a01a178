import sys, functools, jax, jax.numpy as jnp, numpy as np
sys.path.insert(0,"benchmarks")
from timing import *
import kda_jax
from kda_jax import mosaic_gpu
from kda_jax.synthetic import random_operands
from kda_contracts import Sizes
print(jax.devices())
def ops(B,HV,pool_dtype,seed):
    s=Sizes(B=B,H=HV,HV=HV,K=128,V=128,S=2*B+3)
    x=random_operands(s.__class__(**vars(s)|{"S":2*B+3}) if 0 else Sizes(B=B,H=HV,HV=HV,K=128,V=128,S=1),seed=seed,pool_dtype=pool_dtype)
    x["ssm_state_indices"]=np.random.default_rng(seed).permutation(2*B+3)[:B].astype(np.int32)
    pool=jax.random.normal(jax.random.key(seed),(2*B+3,HV,128,128),jnp.dtype(pool_dtype))
    x.pop("initial_state"); return pool,{k:jnp.asarray(v) for k,v in x.items()}
for B,HV in ((1,32),(8,32),(32,12),(64,32),(256,32)):
    live=B*HV*128*128*4; L=layers_for(2*live)
    def mul(pool,x): return pool, pool*jnp.float32(0.999)
    ceil=time_layers(lambda p,x:(p[:1,0,0,0],p*jnp.float32(0.999)),[jax.random.normal(jax.random.key(i),(B,HV,128,128)) for i in range(L)],[None]*L)
    print(B,HV,L,"ceiling",ceil,flush=True)
    for rows in (16,32,64):
      data=[ops(B,HV,"float32",i) for i in range(L)]
      cfg=mosaic_gpu.Config(tile_rows=rows,lanes=32,vector=4)
      def op(pool,x,cfg=cfg):
        sz=Sizes(B=B,H=HV,HV=HV,K=128,V=128,S=pool.shape[0])
        return mosaic_gpu.kda_packed_decode_mosaic_gpu(x["mixed_qkv"],x["a"],x["b"],x["A_log"],x["dt_bias"],pool,x["ssm_state_indices"],sizes=sz,scale=128**-.5,use_qk_l2norm=True,lower_bound=None,out_dtype=jnp.bfloat16,config=cfg)
      t=time_layers(op,[d[0] for d in data],[d[1] for d in data])
      print("  rows",rows,t, "share %.3f ratio %.3f"%(ceil.kernel/t.kernel,t.kernel/ceil.kernel),flush=True)
