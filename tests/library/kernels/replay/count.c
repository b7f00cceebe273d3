// A plugin of QEMU that counts instructions. What it uses of qemu-plugin.h, which not all packages bring, is declared here.
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

typedef uint64_t Plugin;
struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(Plugin, void (*)(Plugin, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int add_is_0, void *, uint64_t);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
void qemu_plugin_register_atexit_cb(Plugin, void (*)(Plugin, void *), void *);

int qemu_plugin_version = 1;
static uint64_t count;

static void translated(Plugin plugin, struct qemu_plugin_tb *block) {
  (void)plugin;
  qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &count, qemu_plugin_tb_n_insns(block));
}
static void ended(Plugin plugin, void *unused) {
  (void)plugin, (void)unused;
  fprintf(stderr, "%" PRIu64 " instructions\n", count);
}
int qemu_plugin_install(Plugin plugin, const void *info, int count_of_options, char **options) {
  (void)info, (void)count_of_options, (void)options;
  qemu_plugin_register_vcpu_tb_trans_cb(plugin, translated);
  qemu_plugin_register_atexit_cb(plugin, ended, NULL);
  return 0;
}
