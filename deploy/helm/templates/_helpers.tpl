{{- define "kvx.name" -}}
{{- printf "%s" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvx.selector" -}}
app.kubernetes.io/name: vllm-kvx
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvx.labels" -}}
{{ include "kvx.selector" . }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "kvx.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "kvx.claim" -}}
{{ .Values.cache.existingClaim | default (printf "%s-cache" (include "kvx.name" .)) }}
{{- end -}}

{{- define "kvx.gpus" -}}
{{- if kindIs "invalid" .Values.gpu.count -}}
{{ mul .Values.tensorParallelSize .Values.dataParallelSize }}
{{- else -}}
{{ int .Values.gpu.count }}
{{- end -}}
{{- end -}}

{{- define "kvx.policies" -}}
{{ prepend .Values.layout .Values.policy | join " " }}
{{- end -}}

{{- /* What one release cannot be, said before anything is made. */ -}}
{{- define "kvx.check" -}}
{{- $many := or (gt (int .Values.replicas) 1) (and .Values.autoscaling.enabled (gt (int .Values.autoscaling.maxReplicas) 1)) .Values.prepare.enabled -}}
{{- if and $many (not .Values.cache.existingClaim) (not (has "ReadWriteMany" .Values.cache.accessModes)) -}}
{{- fail "several replicas, or replicas and the job of `prepare`, share the cache volume: cache.accessModes needs ReadWriteMany; else set replicas=1, autoscaling.enabled=false and prepare.enabled=false" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas is greater than autoscaling.maxReplicas" -}}
{{- end -}}
{{- range $key, $value := .Values.additionalConfig -}}
{{- if has $key (list "kv_policy" "kv_layout") -}}
{{- fail (printf "additionalConfig.%s: set `policy` and `layout` of the chart instead" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Variables, volume and memory that servers and the job have in common. */ -}}
{{- define "kvx.env" -}}
- name: KVX_CACHE_ROOT
  value: /cache/vllm-kvx
{{- with .Values.huggingfaceToken.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.huggingfaceToken.key }}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvx.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 0
  fsGroup: 0
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.gpu.products }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            - key: nvidia.com/gpu.product
              operator: In
              values:
                {{- toYaml . | nindent 16 }}
{{- end }}
volumes:
  - name: cache
    persistentVolumeClaim:
      claimName: {{ include "kvx.claim" . }}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.sharedMemory }}
{{- end -}}

{{- define "kvx.container" -}}
image: {{ include "kvx.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
volumeMounts:
  - name: cache
    mountPath: /cache
  - name: shm
    mountPath: /dev/shm
{{- $gpus := include "kvx.gpus" . | int }}
resources:
  requests:
    {{- toYaml .Values.resources.requests | nindent 4 }}
    {{- if $gpus }}
    {{ .Values.gpu.resource }}: {{ $gpus }}
    {{- end }}
  limits:
    {{- toYaml .Values.resources.limits | nindent 4 }}
    {{- if $gpus }}
    {{ .Values.gpu.resource }}: {{ $gpus }}
    {{- end }}
{{- end -}}
