// The kernels' plain interface: pointers, strides in elements, a number of threads. bindings.cpp calls it with tensors.
#pragma once

#include <cstdint>

namespace hybrid {

enum class DType { kFloat32, kBFloat16, kHalf };
enum class Activation { kSilu, kGelu, kRelu };  // kGelu: by the formula of tanh

struct Rows {  // (n0, n1, dim) with a dense last dimension
  void* data;
  DType dtype;
  int64_t stride0, stride1;
};

struct Attention {
  int64_t batch, heads, kv_heads, dim, value_dim, width;
  Rows query, key, value;         // (B, H, D), (B, K, D), (B, K, Dv): the new token's
  Rows keys, values;              // (S, K, P, D), (S, K, P, Dv): the pages
  int64_t key_step, value_step;   // stride of a column in keys and in values
  int64_t page_columns;           // P
  const int64_t *pages, *positions;  // (B, N), (B)
  int64_t pages_stride;           // N
  float scaling, softcap;         // softcap 0: none
  const float* sinks;             // (H) or null
  const bool* mask;               // (B, width) or null
  int64_t mask_stride;
  Rows out;                       // (B, H, Dv)
  int threads;
};

void decode_attention(const Attention& call);
void attend_one(const Attention& call, int64_t task);  // of batch * kv_heads; by one thread

struct Tokens {  // (B, H, T, D) with a dense last dimension
  void* data;
  int64_t batch_stride, head_stride, step;
};

struct Sequences {
  int64_t batch, heads, kv_heads, length, dim, value_dim;
  DType dtype;                    // of all tensors but the normalisers
  float scaling;
  Tokens query, key, value;       // (B, H, T, D), (B, K, T, D), (B, K, T, Dv)
  Tokens out;                     // (B, H, T, Dv): written; in the backward pass its gradient, read
  float* normalisers;             // (B, H, T), dense: log of the sum of e^score; null: not wanted
  Tokens query_gradient, key_gradient, value_gradient;  // written by the backward pass
  int threads;
};

void causal_attention(const Sequences& call);
void causal_attention_backward(const Sequences& call);

struct Sampling {
  int64_t batch, vocabulary;
  Rows logits;                    // (B, 1, V)
  const int64_t *streams, *positions;
  float temperature, top_p, min_p, repetition_penalty;
  int64_t top_k;
  const bool *seen, *forbidden;   // (B, V) or null
  int64_t seen_stride, forbidden_stride;
  bool* kept;                     // (B, V), dense, or null: is filled with the tokens that may be drawn
  int64_t* tokens;
  float* logprobs;
  int threads;
};

void sample(const Sampling& call);

struct Linear {
  int64_t rows, in_features, out_features;
  Rows x, weight, out;            // (M, 1, in), (N, 1, in), (M, 1, N)
  const float* bias;              // (N) or null
  int threads;
  Rows down, up;                  // (r, 1, in), (N, 1, r): an adapter, which adds scaling up (down x); dot_linear's alone
  int64_t rank;                   // 0: none
  float scaling;
  void* low;                      // (M, r), dense: down x as dot_lower writes it and dot_piece reads it
  void* turned;                   // room for turned_numbers(call), which dot_turn writes; null: not by the matrix unit
};

void linear(const Linear& call);         // any dtypes, few rows
void packed_linear(const Linear& call);  // fp32, many rows
void dot_linear(const Linear& call);     // few rows, all of one dtype for which has_dot_linear
bool has_dot_linear(DType dtype);

struct Piece {  // of a product: the part that one thread computes at a time
  int64_t row, rows, first, count;
};

// The pieces of a product, for who has threads of his own; they compute what dot_linear does.
int64_t dot_pieces(const Linear& call);  // with `turned`, if it is to be used
int64_t turned_numbers(const Linear& call);  // of bf16: room for x turned for the matrix unit, 0 where it is not used
int64_t dot_turns(const Linear& call);   // parts of turning x, before the pieces of all products of this x
void dot_turn(const Linear& call, int64_t part);
void dot_lower(const Linear& call);      // before the pieces of a product with an adapter; by one thread
Piece dot_piece(const Linear& call, int64_t piece);

struct Norm {
  int64_t rows, dim;
  Rows x, out;                    // (M, 1, D)
  const void* weight;             // (D), of the dtype of x
  float eps;
  bool adds_one;
  int threads;
  const void* bias;               // (D): of LayerNorm, by norm_one alone; null: the root mean square's norm
};

void rms_norm(const Norm& call);
void norm_one(const Norm& call, int64_t row);  // by one thread

struct NormGradient {
  Norm norm;                      // out: the gradient by x, written
  Rows gradient;                  // (M, 1, D), by the norm's output
  float* by_weight;               // (threads, D), written: each thread's share; null: not wanted
};

void rms_norm_backward(const NormGradient& call);

struct Gate {
  int64_t count;
  const void *gate, *up;          // dense
  void* out;
  DType dtype;
  bool is_gelu;
  int threads;
};

void gated(const Gate& call);
void gate_all(const Gate& call);  // by one thread

struct GateGradient {
  Gate gate;                      // out: the gradient by gate, written
  const void* gradient;           // by the output
  void* by_up;                    // written
};

void gated_backward(const GateGradient& call);

struct Rotary {
  int64_t batch, heads, length, dim;
  Rows x;                         // (B, H, Q, D), and the step from token to token
  int64_t x_step;
  Rows cosines, sines;            // (B, Q, D)
  void* out;                      // (B, Q, H, D), dense
  int threads;
};

void rotary(const Rotary& call);
void rotate_one(DType dtype, const void* x, const void* cosines, const void* sines, void* out, int64_t dim);

void activate_all(Activation kind, DType dtype, void* x, int64_t count);  // in place, by one thread

struct DecodeLayer {  // one token of each row through a decoder layer; each operation reads what the one before wrote
  int64_t rows;
  DType dtype;                    // of everything but the cache
  Norm before_attention, before_mlp;
  Norm query_norm, key_norm;      // of each head, in place; weight null: none
  Linear query, key, value, output, up, down;
  Linear gate;                    // weight null: none, up is activated alone
  Rows cosines, sines;            // (B, 1, D); null: positions do not turn heads
  Attention attention;
  Activation activation;          // of a gate: not kRelu
  int threads;
};

void decode_layer(const DecodeLayer& call);

struct Vocabulary {
  int64_t rows, size;
  Rows logits;                    // (N, 1, V)
  const int64_t* targets;         // (N)
  float temperature;
  float *logprobs, *normalisers;  // (N) written; normalisers are read by the backward pass
  float* entropy;                 // (N) written, or null; read by the backward pass if it has by_entropy
  bool* correct;                  // (N) written
  const float *by_logprobs, *by_entropy;  // (N) or null, of the backward pass
  void* gradient;                 // (N, V), dense, of the dtype of the logits: written by the backward pass
  int threads;
};

void score_tokens(const Vocabulary& call);
void score_tokens_backward(const Vocabulary& call);

struct Adam {
  int64_t count, step;            // step: the number of this one, from 1
  void* weight;                   // the master rounded, written; or null
  const void* gradient;
  DType weight_dtype, gradient_dtype;
  float *master, *average, *square;
  double rate, beta1, beta2, epsilon, weight_decay;
  float factor;                   // of the gradient
  int threads;
};

void adamw(const Adam& call);
double sum_of_squares(const void* data, DType dtype, int64_t count, int threads);

// -- products of bf16 rows by the processor's matrix unit (Intel AMX), which multiplies whole tiles: 16 rows of 32
// numbers by 16 rows of 32 numbers, sums in fp32; dots.cpp uses it where there is one

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define HYBRID_TILES  // the compiler has them; has_tiles says whether the process does
#endif

constexpr int64_t kTileSide = 16;     // rows of a tile
constexpr int64_t kTileDepth = 32;    // numbers of a row in a tile
constexpr int64_t kTileOutputs = 32;  // of one product_by_tiles: two tiles of W for each load of x

// Whether there is a unit, and whether the operating system lets this process use it; asked once, when the kernels are
// loaded, for it may refuse a process whose threads have too small a stack for signals.
bool compiled_with_tiles();
bool has_tiles();

// Numbers that x takes when it is turned: pairs of neighbours of all rows side by side, zeros up to whole tiles.
constexpr int64_t turned_size(int64_t rows, int64_t in_features) {
  return (rows + kTileSide - 1) / kTileSide * kTileSide * in_features;
}

// Turns kTileDepth numbers of every row of x, from number `k` on: the pair k, k + 1 of row m goes to [k / 2][m].
void turn_for_tiles(const Rows& x, int64_t rows, int64_t k, void* turned);

// sums[m * row + n] = x[m] . w[n] for kTileOutputs outputs and every row; depth: a multiple of kTileDepth. On the way
// the weights of the next outputs are asked for.
void product_by_tiles(const void* turned, int64_t rows, const void* w, int64_t w_step, int64_t depth, float* sums,
                      int64_t row);

}  // namespace hybrid
